// Attention without Python: buffers of the exact size, for the sanitizers, and a scalar reference in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "common/pool.h"
#include "cpu/attention/attention.h"
#include "cpu/features.h"
#include "tests/isas.h"

int attention_failures();

namespace {

namespace cpu = quintet::cpu;

int failures = 0;

void fail(const char* what, const char* isa, int type, int kind, double off) {
    ++failures;
    std::printf("FAILED: %s: %s, type %d, cache %d: off by %g\n", what, isa, type, kind, off);
}

// From -2 to 2, in steps that every type holds exactly.
float number(long i) { return static_cast<float>((i * 37 + i / 7 * 11) % 65 - 32) / 16.0F; }

// A 512th of it where i is a multiple of `step`: sums of products are then no longer exact, and show their order.
float uneven(long i, long step) { return i % step ? number(i) : number(i) / 512.0F; }

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

size_t size_of(cpu::AttentionType type) { return type == cpu::kFloat32 ? 4 : 2; }

void put(float x, cpu::AttentionType type, uint8_t* at) {
    const uint32_t bits = bits_of(x);
    const uint32_t half = x == 0.0F ? 0 : (bits >> 16 & 0x8000) | ((bits & 0x7FFFFFFF) - (112U << 23)) >> 13;
    const uint32_t small = type == cpu::kBfloat16 ? bits >> 16 : half;
    std::memcpy(at, type == cpu::kFloat32 ? &bits : &small, size_of(type));
}

float get(const uint8_t* at, cpu::AttentionType type) {
    uint32_t bits = 0;
    std::memcpy(&bits, at, size_of(type));
    if (type == cpu::kFloat32) return float_of(bits);
    if (type == cpu::kBfloat16) return float_of(bits << 16);
    if ((bits & 0x7FFF) > 0x7C00) return std::numeric_limits<float>::quiet_NaN();
    const double size = std::ldexp(static_cast<double>((bits & 0x3FF) | (bits & 0x7C00 ? 0x400 : 0)),
                                   static_cast<int>(bits & 0x7C00 ? bits >> 10 & 31 : 1) - 25);
    return static_cast<float>(bits & 0x8000 ? -size : size);
}

float float8(uint8_t bits) {
    const int power = bits >> 3 & 15, fraction = bits & 7;
    const double size = std::ldexp(fraction + (power ? 8 : 0), (power ? power : 1) - 10);
    const double value = (bits & 127) == 127 ? std::numeric_limits<double>::quiet_NaN() : size;
    return static_cast<float>(bits & 128 ? -value : value);
}

float float8_wide(uint8_t bits) {
    const int power = bits >> 2 & 31, fraction = bits & 3;
    const double size = std::ldexp(fraction + (power ? 4 : 0), (power ? power : 1) - 17);
    const double value = power < 31 ? size : fraction ? std::numeric_limits<double>::quiet_NaN() : HUGE_VAL;
    return static_cast<float>(bits & 128 ? -value : value);
}

// Value i of a 4-bit row: its group, turned back by the sign that two numbers' common bits give.
double of_groups(const uint8_t* row, long dim, long i) {
    const long first = i / 32 * 32, size = std::min(32L, dim - first);
    const uint8_t* const factors = row + dim / 2 + first / 32 * 4;
    const double scale = get(factors, cpu::kFloat16), least = get(factors + 2, cpu::kFloat16);
    const auto turned = [&](long j) {
        const uint8_t both = row[first / 2 + j % (size / 2)];
        return scale * (j < size / 2 ? both & 15 : both >> 4) + least;
    };
    if (size & (size - 1)) return turned(i - first);
    double sum = 0.0, divisor = 1.0;
    for (long step = 1; step < size; step *= 4) divisor *= 2.0;
    for (long j = 0; j < size; ++j) {
        const bool odd = __builtin_popcountl(static_cast<unsigned long>(j & (i - first))) % 2;
        sum += odd ? -turned(j) : turned(j);
    }
    return sum / divisor;
}

struct Shape {
    long heads, kv_heads, dim, page_size, window;
    float softcap;
    bool sinks, slopes;
    long chunk = 0;

    // The first position that a token sees.
    long first(long at) const {
        if (chunk > 0) return at / chunk * chunk;
        return window > 0 && at + 1 > window ? at + 1 - window : 0;
    }
};

struct Request {
    long cached, count;
};

// A step over a cache of pages that stand in reverse; every array has the size that it needs and no more.
struct Step {
    Shape shape;
    cpu::AttentionType type;
    cpu::KVKind kind;
    std::vector<Request> requests;
    std::vector<int32_t> query_start_loc{0}, seq_lens, block_table, positions, slot_mapping;
    std::vector<float> sinks, slopes;
    std::vector<uint8_t> q, kv, out;
    long width = 0, pages = 1, row;

    Step(const Shape& of, cpu::AttentionType t, cpu::KVKind k, const std::vector<Request>& r)
        : shape(of), type(t), kind(k), requests(r) {
        const size_t number_size = kind == cpu::kKVSame ? size_of(type) : 1;
        row = of.dim * static_cast<long>(number_size) + (kind == cpu::kKVInt8 ? cpu::kScaleBytes : 0);
        if (kind == cpu::kKVInt4) row = cpu::int4_row_bytes(of.dim);
        long last = 0;
        for (const Request& each : r) {
            const long count = (each.cached + each.count + of.page_size - 1) / of.page_size;
            width = count > width ? count : width;
            last += count;
        }
        pages += last;
        for (const Request& each : r) add(each, last);
        q.resize(tokens() * static_cast<size_t>(of.heads * of.dim) * size_of(type));
        out.resize(q.size());
        for (size_t i = 0; i < q.size() / size_of(type); ++i) {
            put(uneven(static_cast<long>(i) + 5, 2), type, q.data() + i * size_of(type));
        }
        for (long h = 0; h < of.heads; ++h) {
            if (of.sinks) sinks.push_back(number(h));
            if (of.slopes) slopes.push_back(std::ldexp(1.0F, -static_cast<int>(h) - 1));
        }
        kv.assign(static_cast<size_t>(pages * 2 * of.kv_heads * of.page_size * row), 0xFF);  // NaN in every type
    }

    void add(const Request& each, long& last) {
        const long count = (each.cached + each.count + shape.page_size - 1) / shape.page_size;
        for (long p = 0; p < width; ++p) block_table.push_back(static_cast<int32_t>(p < count ? last-- : 0));
        for (long p = each.cached; p < each.cached + each.count; ++p) positions.push_back(static_cast<int32_t>(p));
        query_start_loc.push_back(static_cast<int32_t>(positions.size()));
        seq_lens.push_back(static_cast<int32_t>(each.cached + each.count));
    }

    size_t tokens() const { return positions.size(); }

    // What a token of request r holds at `position`, in K (0) or V (1).
    float value(long r, long position, long side, long head, long i) const {
        return uneven(i + 3 * head + 17 * position + 101 * r + 7 * side, 3) * (side ? 1.0F : 0.5F);
    }

    // Everything that the requests hold goes through write_kv, in one call with a stride of two tokens.
    void fill() {
        const long one = shape.kv_heads * shape.dim;
        std::vector<uint8_t> k, v;
        std::vector<int32_t> where;
        for (size_t r = 0; r < requests.size(); ++r) {
            for (long p = 0; p < seq_lens[r]; ++p) {
                const size_t at = where.size() * static_cast<size_t>(one) * size_of(type) * 2;
                k.resize(at + static_cast<size_t>(2 * one) * size_of(type));
                v.resize(k.size());
                for (long i = 0; i < one; ++i) {
                    const size_t to = at + static_cast<size_t>(i) * size_of(type);
                    const long n = static_cast<long>(r);
                    put(value(n, p, 0, i / shape.dim, i % shape.dim), type, k.data() + to);
                    put(value(n, p, 1, i / shape.dim, i % shape.dim), type, v.data() + to);
                }
                const int32_t page = block_table[r * static_cast<size_t>(width) + static_cast<size_t>(p / shape.page_size)];
                where.push_back(static_cast<int32_t>(page * shape.page_size + p % shape.page_size));
            }
        }
        const long stride = 2 * one * static_cast<long>(size_of(type));
        cpu::write_kv({reinterpret_cast<char*>(kv.data()), reinterpret_cast<const char*>(k.data()),
                       reinterpret_cast<const char*>(v.data()), stride, stride, where.data(),
                       static_cast<long>(where.size()), pages, shape.kv_heads, shape.page_size, shape.dim, type, kind});
    }

    void run() {
        cpu::paged_attention({out.data(), q.data(), kv.data(), positions.data(), shape.sinks ? sinks.data() : nullptr,
                              shape.slopes ? slopes.data() : nullptr, shape.heads * shape.dim, shape.heads,
                              shape.kv_heads, shape.dim, shape.page_size, shape.dim, shape.window, shape.chunk, false, true,
                              0.25F, shape.softcap},
                             {query_start_loc.data(), seq_lens.data(), block_table.data(), static_cast<long>(tokens()),
                              static_cast<long>(requests.size()), width, pages},
                             type, kind);
    }

    // Of a row, in bytes of the cache.
    long place(long r, long position, long side, long head) const {
        const long page = block_table[static_cast<size_t>(r * width + position / shape.page_size)];
        const long at = ((page * 2 + side) * shape.kv_heads + head) * shape.page_size + position % shape.page_size;
        return at * row;
    }

    // What the cache holds, read from its bytes.
    double held(long r, long position, long side, long head, long i) const {
        const uint8_t* const from = kv.data() + place(r, position, side, head);
        if (kind == cpu::kKVSame) return get(from + i * static_cast<long>(size_of(type)), type);
        if (kind == cpu::kKVFloat8) return float8(from[i]);
        if (kind == cpu::kKVFloat8Wide) return float8_wide(from[i]);
        if (kind == cpu::kKVInt4) return of_groups(from, shape.dim, i);
        float scale;
        std::memcpy(&scale, from + shape.dim, sizeof scale);
        return static_cast<double>(scale) * static_cast<int8_t>(from[i]);
    }

    double query(size_t token, long head, long i) const {
        return get(q.data() + (static_cast<long>(token) * shape.heads * shape.dim + head * shape.dim + i) *
                                  static_cast<long>(size_of(type)), type);
    }

    // The largest difference between what came out for a token's head and the textbook.
    double off(long r, size_t token, long head) const {
        const long at = positions[token], kv_head = head / (shape.heads / shape.kv_heads);
        const size_t h = static_cast<size_t>(head);
        std::vector<double> acc(static_cast<size_t>(shape.dim), 0.0);
        double total = shape.sinks ? std::exp(static_cast<double>(sinks[h])) : 0.0;
        for (long p = shape.first(at); p <= at; ++p) {
            double score = 0.0;
            for (long i = 0; i < shape.dim; ++i) score += query(token, head, i) * held(r, p, 0, kv_head, i) * 0.25;
            if (shape.softcap > 0) score = shape.softcap * std::tanh(score / shape.softcap);
            if (shape.slopes) score += slopes[h] * static_cast<double>(p - at);
            const double weight = std::exp(score);
            total += weight;
            for (long i = 0; i < shape.dim; ++i) acc[static_cast<size_t>(i)] += weight * held(r, p, 1, kv_head, i);
        }
        double worst = 0.0;
        for (long i = 0; i < shape.dim; ++i) {
            const long place = (static_cast<long>(token) * shape.heads + head) * shape.dim + i;
            const double got = get(out.data() + place * static_cast<long>(size_of(type)), type);
            const double apart = std::fabs(got - acc[static_cast<size_t>(i)] / total);
            worst = apart <= worst ? worst : apart;  // NaN is the worst
        }
        return worst;
    }
};

constexpr double kRoundings[] = {2e-5, 1.6e-2, 2e-3};  // by type, of results up to 2

void attention_is_the_textbooks(const char* isa, const Shape& shape, cpu::AttentionType type, cpu::KVKind kind) {
    const std::vector<Request> mixes[] = {{{0, 70}}, {{129, 1}, {0, 1}, {63, 1}}, {{5, 9}, {200, 1}, {60, 20}}};
    for (const std::vector<Request>& mix : mixes) {
        Step step(shape, type, kind, mix);
        step.fill();
        step.run();
        for (size_t r = 0; r < mix.size(); ++r) {
            const long count = mix[r].count;
            for (long t = 0; t < count; t += t + 4 < count ? 3 : 1) {
                const size_t token = static_cast<size_t>(step.query_start_loc[r] + t);
                for (long head = 0; head < shape.heads; head += shape.heads > 8 ? 7 : 1) {
                    const double off = step.off(static_cast<long>(r), token, head);
                    if (!(off <= kRoundings[type])) return fail("attention", isa, type, kind, off);
                }
            }
        }
    }
}

// Few heads, many positions: stretches go to different threads. One thread must give the same bits.
void threads_change_no_bit(const char* isa, long dim, cpu::AttentionType type, cpu::KVKind kind) {
    Step step({2, 1, dim, 16, 0, 0.0F, false, true}, type, kind, {{2300, 1}, {1020, 6}});
    step.fill();
    step.run();
    const std::vector<uint8_t> shared = step.out;
    const int threads = quintet::pool_threads();
    quintet::set_pool_threads(1);
    step.run();
    quintet::set_pool_threads(threads);
    if (shared != step.out) fail("threads change no bit", isa, type, kind, 0.0);
    for (const long head : {0L, 1L}) {
        const double off = step.off(0, 0, head);
        if (!(off <= kRoundings[type])) fail("a long context", isa, type, kind, off);
    }
}

// A prompt in one piece, and in pieces of one token, of few and of many that cut blocks and pairs of positions.
void pieces_change_no_bit(const char* isa, const Shape& shape, cpu::AttentionType type, cpu::KVKind kind) {
    constexpr long kPrompt = 170;
    Step whole(shape, type, kind, {{0, kPrompt}});
    whole.fill();
    whole.run();
    const long token = shape.heads * shape.dim * static_cast<long>(size_of(type));  // bytes of q and of the result
    for (const Request& piece : {Request{0, 1}, {63, 1}, {64, 1}, {127, 1}, {169, 1}, {61, 3}, {5, 90}, {101, 69}}) {
        Step step(shape, type, kind, {piece});
        step.fill();
        const auto same = [&](const std::vector<uint8_t>& of) { return of.begin() + piece.cached * token; };
        step.q.assign(same(whole.q), same(whole.q) + piece.count * token);
        step.run();
        if (!std::equal(step.out.begin(), step.out.end(), same(whole.out))) {
            return fail("pieces change no bit", isa, type, kind, static_cast<double>(piece.cached));
        }
    }
}

// Rows that are multiplied together see different positions. What one of them does not see may not be a number.
void broken_values_reach_who_sees_them(const char* isa, const Shape& shape, cpu::AttentionType type,
                                       cpu::KVKind kind) {
    constexpr long kPrompt = 110;
    Step step(shape, type, kind, {{0, kPrompt}});
    step.fill();
    step.run();
    const long numbers = shape.heads * shape.dim;
    for (const long broken : {96L, 71L}) {  // the first of a pair, the second of one
        Step other = step;
        for (long head = 0; head < shape.kv_heads; ++head) {
            std::memset(other.kv.data() + other.place(0, broken, 1, head), 0xFF, static_cast<size_t>(other.row));
        }
        other.run();
        for (long i = 0; i < kPrompt * numbers; ++i) {
            const long token = i / numbers;
            const bool sees = token >= broken && shape.first(token) <= broken;
            const uint8_t* const at = other.out.data() + i * static_cast<long>(size_of(type));
            const bool kept = std::memcmp(at, step.out.data() + (at - other.out.data()), size_of(type)) == 0;
            if (sees ? !std::isnan(get(at, type)) : !kept) {
                return fail("broken values reach who sees them", isa, type, kind, static_cast<double>(token));
            }
        }
    }
}

void what_points_outside_is_refused() {
    Step step({2, 1, 16, 16, 0, 0.0F, false, false}, cpu::kFloat32, cpu::kKVSame, {{20, 3}});
    for (int32_t* const field : {&step.block_table[1], &step.positions[2], &step.seq_lens[0], &step.query_start_loc[1]}) {
        const int32_t before = *field;
        *field = 1000;
        try {
            step.run();
            fail("what points outside is refused", "", 0, 0, 0.0);
        } catch (const std::invalid_argument&) {
        }
        *field = before;
    }
}

}  // namespace

int attention_failures() {
    const int threads = quintet::pool_threads();
    quintet::set_pool_threads(3);
    const Shape shapes[] = {
        {6, 3, 16, 16, 0, 0.0F, false, false},  {5, 1, 24, 8, 9, 0.0F, true, false},
        {4, 2, 32, 32, 0, 3.0F, false, true},   {4, 4, 64, 16, 70, 5.0F, true, true},
        {40, 1, 7, 8, 0, 0.0F, false, false},   {2, 1, 128, 16, 1, 0.0F, false, true},
        {6, 2, 96, 16, 13, 0.0F, false, false},
        {4, 2, 64, 16, 0, 0.0F, true, false, 40},
    };
    for (const char* isa : kIsas) {
        try {
            cpu::choose_isa(isa);
        } catch (const std::invalid_argument&) {
            continue;
        }
        for (const auto type : {cpu::kFloat32, cpu::kBfloat16, cpu::kFloat16}) {
            for (const auto kind : {cpu::kKVSame, cpu::kKVInt8, cpu::kKVFloat8, cpu::kKVFloat8Wide, cpu::kKVInt4}) {
                for (const Shape& shape : shapes) {
                    if (kind == cpu::kKVInt4 && shape.dim % 2) continue;
                    attention_is_the_textbooks(isa, shape, type, kind);
                    pieces_change_no_bit(isa, shape, type, kind);
                    broken_values_reach_who_sees_them(isa, shape, type, kind);
                }
                for (const long dim : {16L, 32L}) threads_change_no_bit(isa, dim, type, kind);
            }
        }
    }
    cpu::choose_isa(cpu::isa_name(cpu::isa()));
    what_points_outside_is_refused();
    quintet::set_pool_threads(threads);
    return failures;
}
