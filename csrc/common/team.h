// A team of threads that repeats a job in step, so that the time of each round can be measured.
#pragma once

#include <cstdint>
#include <functional>

namespace quintet {

// Runs prepare(member) once on each of `threads` threads, then rounds of job(member) until `seconds` have passed and at
// least three rounds are done. Every member starts a round together and the round ends with the slowest.
// Returns the shortest round in seconds. Throws std::runtime_error when the threads cannot be started.
double shortest_round(int threads, double seconds, const std::function<void(int)>& prepare,
                      const std::function<void(int)>& job);

}  // namespace quintet
