"""A model's processor, which is transformers' own: text and media become token ids, and arguments of the encoder.

The processor alone decides how many tokens an item takes and which ones they are. Each item is processed by itself:
its arrays do not depend on what else is in a prompt, so they are cached, and found again in the next one.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

from quintet.media.families import MediaModel
from quintet.media.items import AUDIO, IMAGE, ROWS, VIDEO, DecodedMedia, MediaItem, ProcessedPrompt, WireArray
from quintet.media.processors.given import SAMPLING, blank, call_options, processor_input
from quintet.media.processors.made import MediaCache, ProcessedMedia, fields_digest, raw_digest
from quintet.media.processors.parts import (
    ARGUMENTS,
    ATTRIBUTES,
    COUNT,
    OTHER_ATTRIBUTES,
    RecordedPart,
    as_array,
    is_array,
)

LONGEST = 300  # characters of a processor's error
ONE = {IMAGE: "an image", VIDEO: "a video", AUDIO: "a recording"}
WITH_SOUND = ("use_audio_in_video", "load_audio_from_video")  # options of processors: sound between a video's frames
MANY = {IMAGE: "images", VIDEO: "videos", AUDIO: "recordings"}


class HFMediaProcessor:
    """MediaProcessor of a model, by transformers' processor. Any thread may call it; calls take turns."""

    def __init__(self, model: MediaModel, processor: Any) -> None:
        """`processor`: of load_processor(); it becomes part of this object."""
        self.model, self._processor, self._lock = model, processor, Lock()
        self._parts: dict[str, RecordedPart] = {}
        self._text_tokens: dict[str, str] = {}  # kind -> what stands for an item in a text
        joins = next((kind for kind in model.tokens if model.family.kinds[kind].joined), "")  # with tensors of others
        for kind in model.tokens:
            facts, name = model.family.kinds[kind], ATTRIBUTES[kind]
            name = name if hasattr(processor, name) else OTHER_ATTRIBUTES.get(kind, name)
            tensors = bool(facts.processor) or facts.tensors or VIDEO in (kind, joins)
            self._parts[kind] = RecordedPart(getattr(processor, name), int(facts.nested), tensors, kind == AUDIO)
            setattr(processor, name, self._parts[kind])
            self._text_tokens[kind] = _text_token(processor, kind, facts.attribute)
        self._text_ids = {_token_id(processor, token): kind for kind, token in self._text_tokens.items()}
        self.cache = MediaCache(model.cache_bytes)

    def process(
        self, prompt: str | Sequence[int], media: Sequence[DecodedMedia], options: Mapping[str, Any]
    ) -> ProcessedPrompt:
        """See MediaProcessor."""
        self._check(media)
        if any(options.get(name) for name in WITH_SOUND):
            raise ValueError(
                f"{WITH_SOUND[0]}: the sound of videos is not read; give it as a recording beside the video"
            )
        several = self.model.family.counts_pictures and sum(each.kind == IMAGE for each in media) > 1
        with self._lock:
            made = [self._made(each, options, several) for each in media]
            if isinstance(prompt, str) and any(each.is_rows for each in media):
                prompt = self._tokenized(prompt)
            if isinstance(prompt, str):
                made = self._in_order(self._placeholders(prompt), made)
                ids = self._expanded(prompt, made, options)
            else:
                ids, made = self._inserted(list(prompt), made)
        spans = self._spans(ids, made)
        items = [
            MediaItem(each.kind, each.digest, self._arguments(each), mine)
            for each, mine in zip(made, spans, strict=True)
        ]
        self._check_rows(items)
        return ProcessedPrompt(ids, sorted(items, key=lambda item: item.spans[0]))

    def _check(self, media: Sequence[DecodedMedia]) -> None:
        self._check_kinds([*dict.fromkeys(each.kind for each in media)])
        for kind in dict.fromkeys(each.kind for each in media):
            if kind not in self._parts:
                raise ValueError(
                    f"{kind} is not served for models of type {self.model.model_type}; give "
                    f"{' or '.join(MANY[each] for each in self._parts)}"
                )
            count, most = sum(each.kind == kind for each in media), self.model.limits.get(kind)
            if count > 1 and self.model.family.kinds[kind].single:
                raise ValueError(f"the prompt has {count} {MANY[kind]}, and this model takes one; send them apart")
            if most is not None and count > most:
                raise ValueError(
                    f"the prompt has {count} {MANY[kind]}, and limit_mm_per_prompt allows {most}; give fewer, or "
                    "raise it"
                )

    def _check_kinds(self, kinds: Sequence[str]) -> None:
        if self.model.family.apart and len(kinds) > 1:
            raise ValueError(f"this model reads {' and '.join(MANY[kind] for kind in kinds)} in prompts of their own")

    def _check_rows(self, items: Sequence[MediaItem]) -> None:
        most, together = self.model.max_rows, self.model.max_prompt_rows
        largest, whole = max(items, key=lambda item: item.count), sum(each.count for each in items)
        if largest.count > most > 0:
            raise _too_large(largest.kind, largest.count, most)
        run = max((stop - first for each in items if each.attends_ahead for first, stop in each.spans), default=0)
        if run > self.model.max_run > 0:
            raise ValueError(
                f"an image takes {run} tokens that see one another, and a step has {self.model.max_run} of them at "
                "most (max_num_batched_tokens, or the window of the model's layers); raise max_num_batched_tokens"
            )
        if whole > together > 0:
            raise ValueError(
                f"the prompt's media take {whole} tokens, and the device has room for {together} "
                "(encoder_cache_rows), where a step computes the whole prompt; raise encoder_cache_rows, or leave "
                "enable_chunked_prefill on"
            )

    def _made(self, media: DecodedMedia, options: Mapping[str, Any], several: bool) -> ProcessedMedia:
        """Processes an item by itself, or finds it."""
        kind, facts = media.kind, self.model.family.kinds[media.kind]
        if media.is_rows:
            return self._rows(media)
        several = several and kind == IMAGE
        key = raw_digest(media, options, several)
        if (known := self.cache.find(key)) is not None:
            return known
        part = self._parts[kind]
        self._check_size(media, part, options)
        given = processor_input(media, part, facts)
        count = 1 + several  # of two equal ones, the first is read as one of several
        with _one_line_errors():
            out = self._call(
                "" if facts.leads else self._text_tokens[kind] * count, {kind: [given] * count},
                {**call_options(media, part, options), "add_special_tokens": False},
            )  # fmt: skip
            arrays = {name: WireArray.of(as_array(each)) for name, each in part.last.items() if is_array(each)}
            timing = {name: WireArray.of(as_array(out[name])) for name in facts.timing if name in out}
        ids, token = _ids(out)[: len(_ids(out)) // count], self.model.tokens[kind]
        ids = [each for each in ids if each == token] if facts.bare else ids
        rows = ids.count(token)
        if not rows:
            raise ValueError(
                f"the processor gives {ONE[kind]} no token {token} ({facts.token} of config.json), "
                "which its rows would stand for: it is too small, or processor and model do not belong together"
            )
        others = {name: each for name, each in part.last.items() if name not in arrays}
        length = len(given) if kind == AUDIO else 0
        made = ProcessedMedia(kind, key, arrays, tuple(ids), rows, others, timing, length)
        if not media.uuid:
            made = replace(made, digest=fields_digest(kind, self._arguments(made)))
        self.cache.put(key, made)
        return made

    def _rows(self, media: DecodedMedia) -> ProcessedMedia:
        """Returns an item that the caller has encoded: a token for each row, and nothing around them."""
        fields = {ROWS: WireArray.of(media.data)}
        ids = (self.model.tokens[media.kind],) * len(media.data)
        digest = raw_digest(media, {}, False) if media.uuid else fields_digest(media.kind, fields)
        return ProcessedMedia(media.kind, digest, fields, ids, len(ids))

    def _check_size(self, media: DecodedMedia, part: Any, options: Mapping[str, Any]) -> None:
        """Refuses a video of Qwen's with more tokens than there is room for, before its frames are resized."""
        count = getattr(part, "get_num_of_video_patches", None) if media.kind == VIDEO else None
        if count is None or options.get(SAMPLING) or not self.model.max_rows:
            return
        with _one_line_errors():
            rows = int(count(*media.data.shape[:3], dict(options))) // part.merge_size**2
        if rows > self.model.max_rows:
            raise _too_large(VIDEO, rows, self.model.max_rows)

    def _call(self, text: str, media: Mapping[str, Sequence[Any]], options: Mapping[str, Any]) -> Any:
        """Returns what the processor makes of a text and its media."""
        given: dict[str, Any] = {ARGUMENTS[kind]: list(each) for kind, each in media.items()}
        if self.model.family.counts_pictures and IMAGE in media:
            given[ARGUMENTS[IMAGE]] = [given[ARGUMENTS[IMAGE]]]  # of one prompt
        form = "pt" if any(self.model.family.kinds[kind].tensors for kind in media) else None
        return self._processor(text=text, **given, **{"return_tensors": form, **options})

    def _placeholders(self, text: str) -> list[str]:
        """Returns the kinds of a text's placeholders, in order."""
        words = {token: kind for kind, token in self._text_tokens.items()}
        pattern = "|".join(re.escape(each) for each in sorted(words, key=len, reverse=True))
        return [words[each] for each in re.findall(pattern, text)]

    def _in_order(self, kinds: Sequence[str], made: Sequence[ProcessedMedia]) -> list[ProcessedMedia]:
        """Returns the media in the order of their placeholders, which are of these kinds."""
        if all(self.model.family.kinds[each.kind].leads for each in made):
            return list(made)
        for kind, token in self._text_tokens.items():
            there, wanted = kinds.count(kind), sum(each.kind == kind for each in made)
            if there != wanted:
                raise ValueError(
                    f"the prompt has {there} placeholders {token!r} for {wanted} {MANY[kind]}; it takes one for each, "
                    "in their order"
                )
        left = {kind: iter([each for each in made if each.kind == kind]) for kind in self._text_tokens}
        return [next(left[kind]) for kind in kinds]

    def _expanded(self, text: str, made: Sequence[ProcessedMedia], options: Mapping[str, Any]) -> list[int]:
        """Returns the tokens of a text with a placeholder for each item."""
        self._check_frames(made)
        begins = getattr(self._processor.tokenizer, "bos_token", None)
        adds = not (begins and text.startswith(begins))  # a rendered chat brings its special tokens itself
        mine = {kind: [each for each in made if each.kind == kind] for kind in self._parts}
        blanks = {  # the arrays are there already
            kind: [blank(kind, item.samples) for item in each] for kind, each in mine.items() if each
        }
        with contextlib.ExitStack() as stack:
            for kind, each in mine.items():
                stack.enter_context(self._parts[kind].replaying(each))
            stack.enter_context(_one_line_errors())
            return _ids(self._call(text, blanks, {"add_special_tokens": adds, **options}))

    def _tokenized(self, text: str) -> list[int]:
        """Returns the tokens of a text with a placeholder for each item, before they are put into their places."""
        begins = getattr(self._processor.tokenizer, "bos_token", None)
        with _one_line_errors():
            adds = not (begins and text.startswith(begins))
            return list(self._processor.tokenizer(text, add_special_tokens=adds)["input_ids"])

    def _check_frames(self, made: Sequence[ProcessedMedia]) -> None:
        """Raises ValueError for videos that differ in their frames, where the processor takes them as one array."""
        facts = self.model.family.kinds.get(VIDEO)
        if facts is None or not facts.even:
            return
        counts = {each.fields[facts.fields[0]].shape[1] for each in made if each.kind == VIDEO}
        if len(counts) > 1:
            raise ValueError(
                f"the prompt's videos have {' and '.join(map(str, sorted(counts)))} frames, and this model's processor "
                'takes equal numbers; set media_io_kwargs, such as {"video": {"num_frames": 8}}'
            )

    def _inserted(self, ids: list[int], made: list[ProcessedMedia]) -> tuple[list[int], list[ProcessedMedia]]:
        """Returns the tokens of a prompt of token ids, which has a placeholder for each item, or all of its tokens; and
        the media in their order, where kinds share a token."""
        rows: dict[int, int] = {}
        for item in made:
            token = self.model.tokens[item.kind]
            rows[token] = rows.get(token, 0) + item.count
        if sum(rows.values()) != len(made) and all(ids.count(token) == count for token, count in rows.items()):
            if len(rows) < len(kinds := dict.fromkeys(item.kind for item in made)):
                raise ValueError(
                    f"the prompt has all tokens of its {' and '.join(MANY[kind] for kind in kinds)}, which are alike "
                    "for this model: give a text, or one placeholder for each"
                )
            return ids, made
        if self.model.family.numbered and len(made) > 1:
            raise ValueError(
                "this model's processor numbers the items of a prompt: give a text, or all of their tokens"
            )
        ordered = self._in_order([self._text_ids[each] for each in ids if each in self._text_ids], made)
        found = [token for each in made for token in each.token_ids if self.model.family.kinds[each.kind].leads]
        left = iter(ordered)
        for each in ids:
            found += next(left).token_ids if each in self._text_ids else (each,)
        return found, ordered

    def _spans(self, ids: Sequence[int], made: Sequence[ProcessedMedia]) -> list[tuple[tuple[int, int], ...]]:
        """Returns the runs of tokens of each item."""
        places: dict[int, list[int]] = {token: [] for token in self.model.tokens.values()}
        for at, each in enumerate(ids):
            if each in places:
                places[each].append(at)
        for token, mine in places.items():
            rows = sum(each.count for each in made if self.model.tokens[each.kind] == token)
            if len(mine) != rows:
                raise ValueError(
                    f"the prompt has {len(mine)} tokens {token} for rows of media, and they have {rows}: its text "
                    "holds such a token by itself; take it out"
                )
        left = {token: iter(mine) for token, mine in places.items()}
        return [_runs(list(itertools.islice(left[self.model.tokens[each.kind]], each.count))) for each in made]

    def _arguments(self, made: ProcessedMedia) -> dict[str, WireArray]:
        """Those of the fields that the encoder takes, by the names of its arguments, and those of positions."""
        if ROWS in made.fields:
            return made.fields
        facts = self.model.family.kinds[made.kind]
        names = (*facts.fields, COUNT) if self.model.family.counts_pictures else facts.fields
        found = {facts.renamed.get(name, name): made.fields[name] for name in names if name in made.fields}
        if facts.joined:
            found = {name: WireArray.of(each.array().reshape(-1, *each.shape[2:])) for name, each in found.items()}
        return found | made.timing


def _too_large(kind: str, rows: int, most: int) -> ValueError:
    return ValueError(
        f"{ONE[kind]} takes {rows} tokens, and the device has room for {most} (encoder_cache_rows); give a smaller "
        f"one, or start with encoder_cache_rows={rows} or more"
    )


def _text_token(processor: Any, kind: str, attribute: str) -> str:
    """Returns what stands for an item in a text."""
    name = attribute or f"{kind}_token"
    token = getattr(processor, name, None)
    if token is None:
        raise ValueError(f"{type(processor).__name__} names no placeholder of {MANY[kind]} ({name})")
    return str(getattr(token, "content", token))


def _token_id(processor: Any, token: str) -> int:
    """Returns a placeholder as a token; -1 if it is several, so that prompts of token ids have none."""
    found = processor.tokenizer.convert_tokens_to_ids(token)
    return -1 if found is None or found == processor.tokenizer.unk_token_id else int(found)


def _ids(out: Any) -> list[int]:
    """Returns the token ids of the one prompt that a processor was given."""
    found = out["input_ids"]
    row = found[0] if len(found) and not isinstance(found[0], int) else found
    return [int(each) for each in row]


def _runs(places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Rising numbers -> [first, stop) of each run of them."""
    cuts = [at for at in range(1, len(places)) if places[at] != places[at - 1] + 1]
    bounds = zip([0, *cuts], [*cuts, len(places)], strict=True)
    return tuple((places[first], places[stop - 1] + 1) for first, stop in bounds)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Makes any exception of transformers' code a ValueError of one line."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # whatever a processor raises, in any version of it
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]
        raise ValueError(f"the model's processor refuses the prompt or a medium ({reason})") from error
