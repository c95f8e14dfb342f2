"""The number of threads follows the machine: a busy neighbour, and the neighbour's end."""

import logging

from engine.execution.step_threads import LONGEST_TRIAL, PAUSE_S, TRIED, WINDOW, StepThreads


class Machine:
    """Two cores.  A step takes less with two threads, but twenty times as long while somebody else has a core."""

    def __init__(self, choices=(1, 2), chosen=2, is_measured=True):
        self.now = 0.0
        self.threads = chosen
        self.busy = False
        self.ran_with = []
        ways = {"clock": lambda: self.now, "set_threads": self.set_threads, "is_measured": is_measured}
        self.watch = StepThreads(choices, chosen, **ways)

    def set_threads(self, threads):
        self.threads = threads

    def seconds(self):
        if self.busy:
            return 0.008 if self.threads == 1 else 0.1
        return 0.005 if self.threads == 2 else 0.008

    def run(self, seconds, rows=1, tokens=100):
        end = self.now + seconds
        self.ran_with = []
        while self.now < end:
            self.ran_with.append(self.threads)
            took = self.seconds()
            self.now += took
            self.watch.took(rows, tokens, took)


def test_steady_steps_change_nothing():
    machine = Machine()
    machine.run(120)
    assert set(machine.ran_with) == {2}


def test_the_first_steps_check_the_number_of_an_earlier_start():
    machine = Machine(chosen=1, is_measured=False)
    machine.run(1)
    assert machine.threads == 2
    assert machine.ran_with.count(1) <= WINDOW + TRIED
    machine = Machine(chosen=2, is_measured=False)
    machine.busy = True
    machine.run(5)
    assert machine.threads == 1
    machine = Machine(chosen=2, is_measured=False)
    machine.run(5)
    assert machine.ran_with.count(1) == TRIED


def test_a_busy_neighbour_costs_a_few_seconds_and_then_a_thread(caplog):
    machine = Machine()
    machine.run(5)
    machine.busy = True
    with caplog.at_level(logging.INFO):
        machine.run(10)
    assert machine.threads == 1
    assert machine.ran_with.count(2) < 5 * WINDOW
    assert "threads: from 2 to 1" in caplog.text
    assert "100.00 with 2, 8.00 with 1" in caplog.text


def test_the_first_number_comes_back_when_the_neighbour_has_gone():
    machine = Machine()
    machine.run(5)
    machine.busy = True
    machine.run(10)
    machine.busy = False
    machine.run(2 * PAUSE_S)
    assert machine.threads == 2


def test_a_start_beside_a_busy_neighbour_gets_more_threads_when_it_has_gone(caplog):
    machine = Machine(chosen=1)
    machine.busy = True
    machine.run(PAUSE_S / 2)
    assert set(machine.ran_with) == {1}
    machine.busy = False
    with caplog.at_level(logging.INFO):
        machine.run(PAUSE_S)
    assert machine.threads == 2
    assert "threads: from 1 to 2" in caplog.text


def test_steps_as_short_as_the_event_loops_work_get_no_more_threads():
    machine = Machine(chosen=1)
    machine.seconds = lambda: 0.0005
    machine.run(4 * PAUSE_S)
    assert set(machine.ran_with) == {1}


def test_short_steps_that_become_slow_leave_a_core_to_the_event_loop():
    machine = Machine(chosen=1)
    machine.seconds = lambda: 0.0005
    machine.run(5)
    machine.seconds = lambda: 0.002 if machine.threads == 1 else 0.001
    machine.run(PAUSE_S / 2)
    assert set(machine.ran_with) == {1}


def test_steps_that_become_short_give_a_core_back():
    machine = Machine(chosen=1)
    machine.run(2 * PAUSE_S)
    assert machine.threads == 2
    machine.seconds = lambda: 0.0005 if machine.threads == 2 else 0.0008
    machine.run(2 * PAUSE_S)
    assert machine.threads == 1


def test_trials_that_change_nothing_become_rare():
    machine = Machine()
    machine.run(5)
    machine.busy = True
    machine.run(3600)
    assert machine.threads == 1
    # What is hopeless runs twice a trial, and trials are 1, 2, 4, 8 and 16 minutes apart.
    assert machine.ran_with[1000:].count(2) <= 2 * 9


def test_a_moment_is_no_reason():
    machine = Machine()
    machine.run(5)
    machine.busy = True
    machine.run(1.5)
    machine.busy = False
    machine.run(30)
    assert set(machine.ran_with) == {2}


def test_longer_contexts_and_larger_batches_are_not_slow_steps():
    machine = Machine()
    for doubling in range(8):
        machine.seconds = lambda doubling=doubling: 0.005 * 3**doubling
        machine.run(20, tokens=100 << doubling)
        machine.run(20, rows=2 << doubling)
        assert set(machine.ran_with) == {2}


def test_a_context_that_passes_a_power_of_two_ends_no_trial():
    machine = Machine()
    machine.run(5, tokens=127)
    machine.busy = True
    while machine.watch._trial is None:
        machine.run(0.1, tokens=127)
    machine.run(2, tokens=128)
    assert machine.threads == 1


def test_a_trial_ends_without_result_if_its_shape_comes_no_more():
    machine = Machine()
    machine.run(5)
    machine.busy = True
    while machine.watch._trial is None:
        assert not machine.watch.are_tried
        machine.run(0.1)
    assert machine.watch.are_tried, "steps are noted as slow for it"
    machine.run(0.1 * TRIED)  # as many steps as the number in force gets
    machine.run(0.3 * LONGEST_TRIAL, rows=3)
    assert machine.watch._trial is None or machine.watch._trial.shape[0] == 3
