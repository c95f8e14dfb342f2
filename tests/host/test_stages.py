"""Stages of a start name what runs, how far it is, and what each took."""

from engine.host.stages import IMPORTS, Stages


def test_each_stage_has_its_own_seconds_and_the_running_one_its_share() -> None:
    times = iter([0.0, 1.0, 3.5, 4.0, 6.0])
    stages = Stages(clock=lambda: next(times))
    assert stages.now == ""
    stages.begin("weights")
    stages.share(0.425)
    assert stages.now == "weights, 42%"
    stages.begin("threads")
    assert stages.now == "threads"
    stages.begin("weights")  # again
    stages.begin("")
    assert stages.now == ""
    assert str(stages) == "weights 4.50, threads 0.50"
    assert stages.total_s == 5.0


def test_the_life_of_the_process_before_it_counts_as_imports() -> None:
    assert str(Stages().of_process()).startswith(f"{IMPORTS} ")
    assert 0 < Stages().of_process().total_s < 24 * 3600
