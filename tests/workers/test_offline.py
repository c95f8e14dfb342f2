"""The offline API with an executor process: its loop runs in a thread, and the program may just end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from callboard import LLM, SamplingParams
from tests.workers.executors import children
from tests.workers.server import ROOT

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["def add(a, b):", "import "]


@pytest.mark.slow
def test_it_gives_what_it_gives_in_one_process_and_leaves_none_behind() -> None:
    answers = []
    for executor in ("inline", "process"):
        with LLM(progress=False, config={"kv": {"num_pages": 128}, "placement": {"executor": executor}}) as llm:
            answers.append([completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)])
            assert len(children()) == (executor == "process")
    assert answers[0] == answers[1]
    assert not children()


@pytest.mark.slow
def test_a_script_that_does_not_close_it_ends_all_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from callboard import LLM\n"
        "llm = LLM(config={'kv': {'num_pages': 128}, 'placement': {'executor': 'process'}}, progress=False)\n"
        "print(llm.generate('import ')[0].finish_reason)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert os.listdir(tmp_path) == ["script.py"], "a socket was left behind"
