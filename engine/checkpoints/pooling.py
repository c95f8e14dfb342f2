"""What a checkpoint's model is for: text, an embedding of a prompt, or logits of labels; and how a prompt becomes that.

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
    """How a prompt's last states become the output.

    method: the last token's state, or the mean over all.  normalized: an embedding has length 1.
    labels: of a classifier, in the order of its logits.  activation: from its logits to what they stand for.
    score_ids: tokens whose logits are a score, the one for yes and, if there are two, the one for no.
    max_len: longest prompt in tokens; 0 for the model's.  pad_token_id: at the end of a prompt it is no part of it.
    prompts: name -> text to put before another, and default_prompt, the name of the one that is put if none is named.
    dimensions: to which an embedding may be cut; empty for any.
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
        """What may be asked of the model."""
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
    """The architectures whose decoder one has under another head, or under none; () if it names no such."""
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
    """What the files say.  score_tokens: those of ``model.score_tokens``, whose ids ``token_id`` knows.
    has_labels: whether the family has a head for them, whatever the architecture is called.

    Raises WeightsError naming the file, what it says and what is known."""
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
    """Kind -> folder, of what sentence-transformers puts behind one another; {} for a checkpoint of no such thing."""
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
    """What sentence-transformers cuts texts to; 0 if it does not say."""
    fields = _optional(directory / "sentence_bert_config.json")
    return fields.integer("max_seq_length") if fields.has("max_seq_length") else 0


def _labels(fields: Fields) -> tuple[str, ...]:
    """As transformers has them: of ``id2label``, else as many as ``num_labels``, else two."""
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
