"""The use of a checkpoint's model: generating text, embedding a prompt, or classifying it; and how it is pooled.

Owns: reading it from config.json and from the files that sentence-transformers writes, and the head that goes with it.
Does not know: torch, tokenizers, weights, endpoints.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from engine.checkpoints.feature import CheckpointFeature, Reading
from engine.checkpoints.fields import Fields, read_fields
from engine.checkpoints.shape import ClassifierShape, DecoderShape, NoHeadShape, PartShape, RewardShape, TokenScoreShape
from engine.checkpoints.use import GENERATING, Calls, Kind, ModelUse, OutputWay
from engine.types.errors import WeightsError

Activation = Literal["identity", "sigmoid", "softmax"]

CLASSIFIER, REWARD, BARE, LM_HEAD = "ForSequenceClassification", "ForRewardModel", "Model", "LMHeadModel"
METHODS: dict[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean": "mean"}
LEGACY = "pooling_mode_"
LEGACY_NAMES = {"lasttoken": "lasttoken", "mean_tokens": "mean"}
MODULES = ("Transformer", "Pooling", "Normalize", "LogitScore")
NAME: Final = "pooling"
CALLS: Final[Mapping[str, Calls]] = {
    "embed": Calls("embed", "/v1/embeddings"),
    "classify": Calls("classify", "/classify"),
    "score": Calls("score", "/v1/score, /v1/rerank"),
    "pool": Calls("encode", "/pooling"),
}


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """The way from a prompt's last states to the output.

    method: the last token's state, or the mean over all.  normalized: whether an embedding is scaled to length 1.
    labels: of a classifier, in the order of its logits.  activation: turns its logits into scores.
    score_ids: tokens whose logits are a score: the one for yes and, if there are two, the one for no.
    max_len, pad_token_id: as in ``ModelUse``.
    prompts: name -> text to put before another.  default_prompt: the name used if a request names none.
    dimensions: sizes to which an embedding may be cut; empty for any.
    """

    kind: Kind = "generate"
    method: Literal["last", "mean"] = "last"
    normalized: bool = True
    labels: tuple[str, ...] = ()
    activation: Activation = "identity"
    score_ids: tuple[int, ...] = ()
    max_len: int = 0
    pad_token_id: int | None = None
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    dimensions: tuple[int, ...] = ()

    @property
    def use(self) -> ModelUse:
        """The use of the model."""
        added: tuple[str, ...] = ("classify", "score", "pool") if len(self.labels) == 1 else ("classify", "pool")
        if self.kind != "classify":
            added = ("embed", "score", "pool") if self.kind == "embed" else ("embed", "pool")
        ways = (
            {"classify": OutputWay()}
            if self.kind == "classify"
            else {"last": OutputWay(), "mean": OutputWay(whole=True)}
        )
        generates = self.kind == "generate"
        return ModelUse(
            kind=self.kind,
            title=str(self),
            tasks=(GENERATING.tasks if generates else {}) | {task: CALLS[task] for task in added},
            ways=(GENERATING.ways if generates else {}) | ways,
            max_len=self.max_len,
            pad_token_id=self.pad_token_id,
            own={NAME: msgspec.msgpack.encode(self)},
        )

    @classmethod
    def of(cls, use: ModelUse) -> "Pooling":
        """Return the part of a model's use that ``use`` has stored; that of a generating model if there is none."""
        return msgspec.msgpack.decode(use.own[NAME], type=cls) if NAME in use.own else cls()

    def __str__(self) -> str:
        if self.kind == "generate":
            return "a generating model"
        if self.kind == "embed":
            return "an embedding model"
        return "a reranking or reward model" if len(self.labels) == 1 else f"a classifier of {len(self.labels)} labels"


class PoolingCheckpoints(CheckpointFeature):
    """Reads checkpoints of models that pool."""

    def decoders(self, architecture: str) -> tuple[str, ...]:
        return causal_names(architecture)

    def read(self, reading: Reading) -> Reading:
        """Return the reading with the model's use, and the head that it has in place of the LM head."""
        shape = reading.shape
        has_labels = shape.task_head is not None
        pooling = read_pooling(reading, has_labels=has_labels)
        if pooling.kind != "generate" and shape.built_by != DecoderShape.built_by:
            only = f"only by the decoder that most families share, and {reading.architecture} has another"
            raise WeightsError(f"{reading.directory}: {pooling} is served {only}")
        if unknown := [one for one in pooling.score_ids if one >= shape.vocab_size]:
            last = f"the model's last is {shape.vocab_size - 1}"
            raise WeightsError(f"{reading.directory}: a score is read from the logit of token {unknown[0]}, but {last}")
        if not has_labels:
            shape = msgspec.structs.replace(shape, task_head=_head(reading.architecture, shape, pooling))
        return replace(reading, shape=shape, use=pooling.use)


def checkpoint_feature() -> PoolingCheckpoints:
    """Return the feature."""
    return PoolingCheckpoints()


def causal_names(architecture: str) -> tuple[str, ...]:
    """Return causal-LM architectures whose decoder this one shares, with another head or none; () if there are none."""
    for suffix in (CLASSIFIER, REWARD, BARE):
        if architecture.endswith(suffix) and not architecture.endswith(LM_HEAD):
            stem = architecture.removesuffix(suffix).removesuffix("Text")
            return f"{stem}ForCausalLM", f"{stem}{LM_HEAD}"
    return ()


def read_pooling(reading: Reading, *, has_labels: bool = False) -> Pooling:
    """Read how prompts are pooled.  Raises WeightsError naming the file, what it says and what is known.

    has_labels: whether the family has a head for labels, whatever the architecture is called."""
    directory, architecture, fields = reading.directory, reading.architecture, reading.fields
    if reading.score_tokens:
        ids = tuple(map(reading.token_id, reading.score_tokens))
        return _classifier(directory, fields, ("score",), "sigmoid", score_ids=ids)
    if has_labels or architecture.endswith(CLASSIFIER):
        labels = _labels(fields)
        return _classifier(directory, fields, labels, _by_problem(fields, labels))
    if architecture.endswith(REWARD):
        return _classifier(directory, fields, ("reward",), "identity")
    modules = _modules(directory)
    if "LogitScore" in modules:
        score = read_fields(directory / modules["LogitScore"] / "config.json")
        names = ("true_token_id", "false_token_id") if score.has("false_token_id") else ("true_token_id",)
        ids = tuple(score.integer(name, minimum=0) for name in names)
        return _classifier(directory, fields, ("score",), "sigmoid", score_ids=ids)
    if modules or causal_names(architecture):
        return _embedding(directory, fields, modules)
    return Pooling()


def _head(architecture: str, shape: DecoderShape, pooling: Pooling) -> PartShape | None:
    """Return the head that the model has in place of the LM head, by its use."""
    if pooling.score_ids:
        name = shape.names.embedding if shape.tied else shape.names.head
        return TokenScoreShape(
            token_ids=pooling.score_ids,
            vocab_size=shape.vocab_size,
            name=name,
            scale=shape.logit_scale,
            cap=shape.logit_cap,
        )
    if architecture.endswith(REWARD):
        return RewardShape()
    if pooling.kind == "classify":
        return ClassifierShape(num_labels=len(pooling.labels))
    return NoHeadShape() if pooling.kind == "embed" else None


def _classifier(directory: Path, fields: Fields, labels: tuple[str, ...], usual: Activation, **more: Any) -> Pooling:
    config = _optional(directory / "config_sentence_transformers.json")
    name = config.text("activation_fn", fields.section("sentence_transformers").text("activation_fn", usual))
    name = name.rpartition(".")[2].lower()
    activation = msgspec.convert(name, Activation) if name in ("identity", "sigmoid", "softmax") else usual
    return Pooling(
        kind="classify",
        labels=labels,
        activation=activation,
        max_len=_max_len(directory),
        pad_token_id=fields.integer("pad_token_id", minimum=0) if _has_pad(fields) else None,
        **more,
    )


def _embedding(directory: Path, fields: Fields, modules: dict[str, str]) -> Pooling:
    config = _optional(directory / "config_sentence_transformers.json")
    prompts, default = config.section("prompts"), config.text("default_prompt_name", "")
    if default and not prompts.has(default):
        raise config.error("default_prompt_name", default, f"one of {', '.join(prompts.table) or 'no prompts'}")
    dimensions = fields.integers("matryoshka_dimensions")
    if fields.table.get("is_matryoshka") is False:
        dimensions = (fields.integer("hidden_size"),)
    return Pooling(
        kind="embed",
        method=_method(directory / modules["Pooling"] / "config.json") if "Pooling" in modules else "last",
        normalized="Normalize" in modules or not modules,
        max_len=_max_len(directory),
        prompts={name: prompts.text(name) for name in prompts.table if prompts.has(name)},
        default_prompt=default,
        dimensions=dimensions,
    )


def _modules(directory: Path) -> dict[str, str]:
    """Return kind -> folder of sentence-transformers' modules; {} if there are none."""
    path = directory / "modules.json"
    if not path.exists():
        return {}
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        found = {str(one["type"]).rpartition(".")[2]: str(one["path"]) for one in modules}
    except (OSError, msgspec.MsgspecError, KeyError) as error:
        raise WeightsError(f"{path}: not a list of modules with their types and paths: {error}") from None
    if unknown := [name for name in found if name not in MODULES]:
        raise WeightsError(f"{path}: the module {unknown[0]!r} is not known; known are {', '.join(MODULES)}")
    for folder in found.values():
        if folder.startswith("/") or ".." in Path(folder).parts:
            raise WeightsError(f"{path}: the module's path {folder!r} leads out of the checkpoint")
    return found


def _method(path: Path) -> Literal["last", "mean"]:
    fields = read_fields(path)
    named = fields.table.get("pooling_mode")
    modes = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if named is None:
        on = [name.removeprefix(LEGACY) for name, value in fields.table.items() if value is True and LEGACY in name]
        modes = [LEGACY_NAMES.get(name, name) for name in on]
    if len(modes) != 1 or modes[0] not in METHODS:
        raise fields.error("pooling_mode", modes, f"one of {', '.join(METHODS)}")
    method = METHODS[modes[0]]
    if method == "mean" and not fields.flag("include_prompt", True):
        raise fields.error("include_prompt", False, "true: the mean is over all tokens of a text")
    return method


def _max_len(directory: Path) -> int:
    """Return the length to which sentence-transformers cuts texts; 0 if there is none."""
    fields = _optional(directory / "sentence_bert_config.json")
    return fields.integer("max_seq_length") if fields.has("max_seq_length") else 0


def _labels(fields: Fields) -> tuple[str, ...]:
    """Return the labels as transformers does: from ``id2label``, else ``num_labels`` many, else two."""
    names = fields.section("id2label").table
    if not names:
        return tuple(f"LABEL_{index}" for index in range(fields.integer("num_labels", 2, maximum=1 << 16)))
    ordered = [names.get(str(index)) for index in range(len(names))]
    if not all(isinstance(name, str) for name in ordered):
        raise fields.error("id2label", names, f"a name for each number from 0 to {len(names) - 1}")
    return tuple(map(str, ordered))


def _by_problem(fields: Fields, labels: tuple[str, ...]) -> Activation:
    problem = fields.text("problem_type", "")
    if problem == "regression":
        return "identity"
    if problem == "multi_label_classification" or len(labels) == 1:
        return "sigmoid"
    return "softmax"


def _has_pad(fields: Fields) -> bool:
    pad = fields.table.get("pad_token_id")
    return isinstance(pad, int) and pad >= 0  # some files have -1 for none


def _optional(path: Path) -> Fields:
    return read_fields(path) if path.exists() else Fields({}, str(path))
