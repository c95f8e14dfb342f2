"""The use of a checkpoint's model: generating text, embedding a prompt, or classifying it; and how it is pooled.

Owns: reading it from config.json and from the files that sentence-transformers writes.
Does not know: torch, tokenizers, weights, endpoints.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from engine.checkpoints.fields import Fields, read_fields
from engine.types.errors import WeightsError

Kind = Literal["generate", "embed", "classify"]
Task = Literal["generate", "embed", "classify", "score", "pool"]
Activation = Literal["identity", "sigmoid", "softmax"]

CLASSIFIER, REWARD, BARE, LM_HEAD = "ForSequenceClassification", "ForRewardModel", "Model", "LMHeadModel"
METHODS: dict[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean": "mean"}
LEGACY = "pooling_mode_"
LEGACY_NAMES = {"lasttoken": "lasttoken", "mean_tokens": "mean"}
MODULES = ("Transformer", "Pooling", "Normalize", "LogitScore")


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """The way from a prompt's last states to the output.

    method: the last token's state, or the mean over all.  normalized: whether an embedding is scaled to length 1.
    labels: of a classifier, in the order of its logits.  activation: turns its logits into scores.
    score_ids: tokens whose logits are a score: the one for yes and, if there are two, the one for no.
    max_len: longest prompt in tokens; 0 for the model's.  pad_token_id: not counted at the end of a prompt.
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
    def tasks(self) -> frozenset[Task]:
        """Tasks that the model can do."""
        if self.kind == "generate":
            return frozenset(("generate", "embed", "pool"))
        if self.kind == "embed":
            return frozenset(("embed", "score", "pool"))
        return frozenset(("classify", "score", "pool") if len(self.labels) == 1 else ("classify", "pool"))

    def __str__(self) -> str:
        if self.kind == "generate":
            return "a generating model"
        if self.kind == "embed":
            return "an embedding model"
        return "a reranking or reward model" if len(self.labels) == 1 else f"a classifier of {len(self.labels)} labels"


GENERATING: Final = Pooling()


def causal_names(architecture: str) -> tuple[str, ...]:
    """Return causal-LM architectures whose decoder this one shares, with another head or none; () if there are none."""
    for suffix in (CLASSIFIER, REWARD, BARE):
        if architecture.endswith(suffix) and not architecture.endswith(LM_HEAD):
            stem = architecture.removesuffix(suffix).removesuffix("Text")
            return f"{stem}ForCausalLM", f"{stem}{LM_HEAD}"
    return ()


def read_pooling(
    directory: Path,
    architecture: str,
    fields: Fields,
    score_tokens: tuple[str, ...],
    token_id: Callable[[str], int],
    *,
    has_labels: bool = False,
) -> Pooling:
    """Read how prompts are pooled.  Raises WeightsError naming the file, what it says and what is known.

    score_tokens: ``model.score_tokens``.  token_id: returns a token's id.
    has_labels: whether the family has a head for labels, whatever the architecture is called."""
    if score_tokens:
        ids = tuple(map(token_id, score_tokens))
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
    return GENERATING


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
