"""EleutherAI's harness: log probabilities of given answers, and free ones.  ``make conformance`` installs it."""

import json
from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: make conformance")
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
LINES = [
    {"question": "import numpy as", "choices": [" np", " zebra"], "answer": 0},
    {"question": "def __init__(", "choices": ["banana", "self"], "answer": 1},
    {"question": "for i in range(", "choices": ["10):", "dog dog dog"], "answer": 0},
]


def test_choices_are_scored_and_text_is_generated(url: str, tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "lines.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choices = {
        **shared,
        "task": "callboard_choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    free = {
        **shared,
        "task": "callboard_free",
        "output_type": "generate_until",
        "doc_to_target": "x",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    }
    arguments = {
        "model": "demo",
        "base_url": f"{url}/completions",
        "tokenizer": str(DEMO),
        "tokenized_requests": False,
        "num_concurrent": 2,
        "max_length": 512,
    }
    found = lm_eval.simple_evaluate("local-completions", arguments, tasks=[choices, free], log_samples=True)
    assert found["results"]["callboard_choices"]["acc,none"] == 1
    for sample in found["samples"]["callboard_free"]:
        (text,) = sample["resps"][0]
        assert isinstance(text, str)
        assert "\n" not in text
