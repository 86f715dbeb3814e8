"""Pooling of a checkpoint: whether it returns text or numbers, its tasks, and how hidden states become numbers.

The sources are its config.json (architectures), the files of Sentence Transformers beside it, and pooler_config, which
takes precedence over both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quintet.config import EngineConfig, PoolerConfig
from quintet.hub.config_checks import CLASS_FAMILIES, GENERATIVE_SUFFIXES
from quintet.hub.sentence_settings import SentenceSettings, read_tokenizer_config, tokenizer_length
from quintet.hub.sentence_transformers import SentenceTransformersConfig, has_modules, read_cross_encoder, read_sentence

# ends of the names of classes -> what they are converted to
TASKS_BY_CLASS = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "classify",
    "ForTextRanking": "classify",
    "ForProcessRewardModel": "reward",
    "ForRewardModel": "reward",
    "RewardModel": "reward",
    "EmbeddingModel": "embed",
    "ForMaskedLM": "embed",
    "ForMaskedLMHead": "embed",
    "ForPreTraining": "embed",
    "ForTextEncoding": "embed",
    "ColBERT": "embed",
    "ColPaliForRetrieval": "embed",
    "ColQwen2ForRetrieval": "embed",
    "JinaForRanking": "embed",
    "ModernBert": "embed",
    "BertGenerationEncoder": "embed",
    "Model": "embed",
}
LATE_INTERACTION = ("ColPaliForRetrieval", "ColQwen2ForRetrieval")  # of pictures
SPARSE = "BgeM3EmbeddingModel"  # has heads of tokens beside: classes are how much each counts
SPLADE = "BertSpladeSparseEmbeddingModel"  # how much each token of the vocabulary counts (Formal et al. 2021)
RANKING = "JinaForRanking"  # rows at the tokens that end documents and queries, projected
VOYAGE = "VoyageQwen3BidirectionalEmbedModel"  # a product behind a decoder whose tokens see both ways
RANKING_TOKENS = {"doc_embed_token_id": 151670, "query_embed_token_id": 151671}  # entries -> its published tokens
# entries of a config.json that no class of transformers has; hf_overrides may give them
ENTRIES = (
    *("matryoshka_dimensions", "is_matryoshka", "is_causal", "num_labels", "classifier_from_token", "method"),
    *("is_original_qwen3_reranker", "use_bidirectional_attention", "classifier_pooling", "sentence_transformers"),
    *("use_sep_token", "task", *RANKING_TOKENS),
)
BIDIRECTIONAL = "Bidirectional"  # in names of classes of decoders whose tokens see those after them
MEAN_POOLING_TYPES = (
    *("jina_bert", "jina_embeddings_v3", "xlm-roberta-flash"),
    *("mpnet", "nomic_bert", "nomic_bert_moe", "gemma3_text"),
)  # families of models that use mean pooling, if no file names another


LAST_POOLING_TYPES = ("clip_text_model", "siglip_text_model", "siglip2_text_model")  # of encoders, by the last token


@dataclass(frozen=True)
class Pooling:
    """Pooling settings of one model: how its hidden states become numbers."""

    convert: str  # embed, classify or reward
    causal: bool  # whether a token sees those before it alone
    tasks: tuple[str, ...]  # the first is the one that encode() means
    sequence: str  # CLS, LAST or MEAN, for tasks of whole texts
    token: str  # ALL or STEP, for those of tokens
    normalize: bool  # embeddings
    activate: bool | None = None  # classes; None: they are
    logit_bias: float | None = None
    dimensions: int | None = None  # that embeddings have if a request does not say
    matryoshka: tuple[int, ...] | bool = False  # which others a request may ask for; True: any
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    chunked: bool = False  # whether longer texts are embedded in pieces,
    max_embed_len: int | None = None  # of so many tokens at most
    token_heads: bool = False  # BGE M3: sparse_linear.pt and colbert_linear.pt
    projects_tokens: bool = False  # ColBERT: its projection among the model's tensors
    truncates_left: bool = False  # longer texts lose their beginning
    splade: bool = False  # an embedding has the most that any token says of each token of the vocabulary
    ends: tuple[Any, Any] = (None, None)  # a first and a last token that say nothing
    row_tokens: tuple[int, ...] = ()  # tokens whose rows count, those of one after those of another
    projected: str = ""  # the class whose projection stands among the model's tensors
    sentence: SentenceTransformersConfig = SentenceTransformersConfig()

    @property
    def length(self) -> int | None:
        """Tokens of the longest text that the model was made for, where Sentence Transformers' files say so."""
        return self.sentence.settings.max_length


def is_pooling_model(config: EngineConfig, raw: Mapping[str, Any], folder: Path) -> bool:
    """Returns whether a model is run as a pooling model: by runner or convert, else by its config.json and files."""
    if config.runner != "auto":
        return config.runner == "pooling"
    if config.convert not in ("auto", "none"):
        return True
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        return False
    if has_modules(folder):
        return True
    generates = any(name.endswith(GENERATIVE_SUFFIXES) or name in CLASS_FAMILIES for name in names)
    return bool(names) and not generates and _converted(names) is not None


def _converted(architectures: Sequence[str]) -> str | None:
    """Returns the pooling type of a model class, by its name; None: the name is not known."""
    ends = sorted(TASKS_BY_CLASS, key=len, reverse=True)
    found = (next((end for end in ends if name.endswith(end)), None) for name in architectures)
    return next((TASKS_BY_CLASS[end] for end in found if end is not None), None)


def plan_pooling(config: EngineConfig, hf_config: Any, folder: Path, encoder: bool) -> Pooling:
    """Chooses the model's pooling settings. `encoder`: its tokens attend to those after them. ValueError names what is
    not possible."""
    names = getattr(hf_config, "architectures", None) or []
    own = _converted(names) or "embed"
    convert = own if config.convert in ("auto", "none") else config.convert
    read = {"embed": read_sentence, "classify": read_cross_encoder}.get(convert)
    sentence = SentenceTransformersConfig() if read is None else read(folder)
    if encoder and not has_modules(folder):
        sentence = replace(sentence, settings=SentenceSettings(max_length=tokenizer_length(folder)))
    late = any("ColBERT" in name or name in LATE_INTERACTION for name in names)
    projects_tokens = convert == "embed" and late and not sentence.modules
    if projects_tokens:
        sentence = replace(sentence, pools_tokens=True, normalize=True)
    asked = config.pooler_config or PoolerConfig()
    kind = hf_config.model_type
    by_tokens = own == "reward" or any(name.endswith("ForTokenClassification") for name in names)
    encoder_type = "LAST" if kind in LAST_POOLING_TYPES else "CLS"
    encoder = encoder or any(name.startswith(f"Lfm2{BIDIRECTIONAL}") for name in names)  # as vLLM pools it
    made = "MEAN" if kind in MEAN_POOLING_TYPES and convert == "embed" else encoder_type if encoder else "LAST"
    if convert == "classify" and kind == "modernbert" and getattr(hf_config, "classifier_pooling", "cls") == "mean":
        made = "MEAN"
    token = asked.type_for(True) or ("STEP" if asked.step_tag_id is not None else "ALL")
    pooling = Pooling(
        convert=convert,
        causal=not (encoder or bidirectional(hf_config)),
        tasks=_tasks(convert, by_tokens, _labels(hf_config), asked),
        sequence=asked.type_for(False) or sentence.pooling or getattr(hf_config, "pooling_type", None) or made,
        token=token,
        normalize=_first_set(asked.normalize, asked.use_activation, sentence.normalize, True),
        activate=_first_set(asked.use_activation, asked.normalize),
        logit_bias=asked.logit_bias,
        dimensions=asked.dimensions,
        matryoshka=_matryoshka(hf_config),
        step_tag_id=asked.step_tag_id,
        returned_token_ids=asked.returned_token_ids,
        chunked=asked.enable_chunked_processing,
        max_embed_len=asked.max_embed_len,
        projects_tokens=projects_tokens,
        truncates_left=read_tokenizer_config(folder).get("truncation_side") == "left",
        sentence=sentence,
    )
    if token == "STEP" and pooling.step_tag_id is None and pooling.returned_token_ids is None:
        raise ValueError("pooler_config: pooling_type STEP gives the rows at one token; say which with step_tag_id")
    if convert == "embed" and SPARSE in names:
        return replace(pooling, tasks=("embed", "token_embed", "token_classify"), token_heads=True)
    if convert == "embed" and sentence.pools_tokens:  # ColBERT: of tokens alone
        return replace(pooling, tasks=("token_embed",))
    return _by_class(pooling, names, hf_config, asked) if convert == "embed" else pooling


def _by_class(pooling: Pooling, names: Sequence[str], hf_config: Any, asked: PoolerConfig) -> Pooling:
    """Returns the pooling of a class that answers otherwise than with a row, or the mean of some."""
    plain = bool(_first_set(asked.normalize, asked.use_activation, False))
    if SPLADE in names:
        ends = getattr(hf_config, "cls_token_id", None), getattr(hf_config, "sep_token_id", None)
        return replace(pooling, sequence="ALL", normalize=plain, splade=True, ends=ends)
    if RANKING in names:
        given = {name: getattr(hf_config, name, None) for name in RANKING_TOKENS}
        tokens: tuple[Any, ...] = tuple(
            token if given[name] is None else given[name] for name, token in RANKING_TOKENS.items()
        )
        if any(type(each) is not int or each < 0 for each in tokens):
            raise ValueError(f"config.json has {given}; a token's id is a whole number from 0 on")
        return replace(pooling, tasks=("token_embed",), normalize=plain, row_tokens=tokens, projected=RANKING)
    return replace(pooling, projected=VOYAGE) if VOYAGE in names else pooling


def bidirectional(hf_config: Any) -> bool:
    """Returns whether a decoder's tokens see those after them, by its class's name or by entries of config.json."""
    if any(BIDIRECTIONAL in name for name in getattr(hf_config, "architectures", None) or []):
        return True
    causal = getattr(hf_config, "is_causal", None)
    seen = getattr(hf_config, "use_bidirectional_attention", None)
    return causal is False or seen in (True, "all")  # Gemma 4: "vision" is of media alone


def _tasks(convert: str, by_tokens: bool, labels: int, asked: PoolerConfig) -> tuple[str, ...]:
    of_tokens = asked.pooling_type in ("ALL", "STEP")
    if convert == "embed":
        return ("token_embed", "embed") if of_tokens else ("embed", "token_embed")
    if convert == "reward":
        return ("reward", "token_classify")
    if by_tokens or of_tokens:
        return ("token_classify",)
    return ("classify", "score", "token_classify") if labels == 1 else ("classify", "token_classify")


def _labels(hf_config: Any) -> int:
    """Classes that a text may have."""
    if listed := getattr(hf_config, "classifier_from_token", None):
        original = getattr(hf_config, "is_original_qwen3_reranker", False)
        return 1 if original or getattr(hf_config, "method", None) == "from_2_way_softmax" else len(listed)
    named = getattr(hf_config, "id2label", None)
    return len(named) if isinstance(named, dict) and named else int(getattr(hf_config, "num_labels", 2) or 2)


def _first_set(*values: bool | None) -> Any:
    """The first that says anything."""
    return next((each for each in values if each is not None), None)


def _matryoshka(hf_config: Any) -> tuple[int, ...] | bool:
    """Returns the Matryoshka dimensions of an embedding, as vLLM reads them: a list, True for any, False for none."""
    listed = getattr(hf_config, "matryoshka_dimensions", None)
    if isinstance(listed, list) and all(type(each) is int and each > 0 for each in listed):
        return tuple(sorted(listed))
    return bool(getattr(hf_config, "is_matryoshka", False))
