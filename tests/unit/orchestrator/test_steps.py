"""How far the workers of a node are, and which of them takes too long."""

from pathlib import Path

from tests.support.manual_clock import ManualClock
from zero_agent.workers.progress import HangPolicy, Steps, load_in_words
from zero_contract.worker import Preparing, Progress, Restored, WaitReply

BUSY = "no step for 6.0 s (limit 5.0 s, --hang-timeout), and it waits for no other rank"


def begun(tmp_path: Path) -> tuple[Steps, ManualClock]:
    clock = ManualClock()
    steps = Steps(HangPolicy(limit_s=5.0), clock)
    steps.begin({rank: tmp_path / str(rank) for rank in range(2)})
    steps.ask = lambda rank: steps.answered(rank, WaitReply(request=0))
    return steps, clock


def test_steps_of_the_engine_and_pulses_of_a_script_count_the_same(tmp_path):
    steps, clock = begun(tmp_path)
    steps.beat(0, Progress(step=1))
    (tmp_path / "1").write_text("2")
    assert steps.too_slow() is None
    assert steps.last == Progress(step=2)
    clock.advance(4.0)
    steps.beat(0)
    clock.advance(2.0)
    why = "no step for 6.0 s (limit 5.0 s, --hang-timeout); it cannot say what it waits for"
    assert steps.too_slow() == (1, why)


def test_a_worker_that_has_ended_does_not_hang_while_another_one_works_on(tmp_path):
    """As rank 0 does, which evaluates or exports the model after the last step."""
    steps, clock = begun(tmp_path)
    steps.beat(0, Progress(step=9))
    steps.beat(1, Progress(step=9))
    steps.ended(1)
    for _ in range(3):
        clock.advance(4.0)
        steps.beat(0, Progress(step=9))
    assert steps.too_slow() is None
    steps.begin({rank: tmp_path / str(rank) for rank in range(2)})
    steps.beat(1, Progress(step=10))
    clock.advance(6.0)
    assert steps.too_slow() == (1, BUSY)


def test_a_heartbeat_of_the_script_does_not_replace_what_its_run_reports(tmp_path):
    steps, clock = begun(tmp_path)
    steps.beat(0, Progress(step=40, samples=320, loss=0.5))
    clock.advance(4.0)
    (tmp_path / "0").write_text("3 loss=9.0")  # of the epoch, say
    assert steps.too_slow() is None
    assert (steps.last, steps.finished) == (Progress(step=40, samples=320, loss=0.5), 40)
    clock.advance(4.0)
    assert steps.too_slow() is None  # it was a sign of life
    clock.advance(2.0)
    assert steps.too_slow() == (0, BUSY)


def test_a_worker_that_has_said_nothing_is_not_judged(tmp_path):
    steps, clock = begun(tmp_path)
    clock.advance(1e6)
    assert (steps.too_slow(), steps.finished) == (None, None)


def test_a_round_begins_without_the_times_of_the_last_one_and_with_its_step(tmp_path):
    steps, clock = begun(tmp_path)
    steps.promise()
    assert steps.finished == 0
    steps.beat(0, Progress(step=7))
    clock.advance(100.0)
    steps.begin({})
    assert (steps.too_slow(), steps.finished) == (None, 7)


def test_what_the_worker_that_is_least_far_does_is_said_until_each_has_taken_a_step(tmp_path):
    steps, _ = begun(tmp_path)
    assert steps.preparing == ""
    steps.prepares(0, Preparing(what="first step"))
    steps.prepares(1, Preparing(what="loading x", part=0.4))
    assert steps.preparing == "loading x: 40%"
    steps.beat(1, Progress(step=1))
    assert steps.preparing == "first step"
    steps.beat(0, Progress(step=1))
    assert steps.preparing == ""
    steps.prepares(0, Preparing(what="first step"))
    steps.begin({})
    assert steps.preparing == ""


def test_a_load_after_steps_of_the_round_does_not_read_as_if_training_went_back(tmp_path):
    """As that of the Trainer's best weights at the end of its training."""
    steps, _ = begun(tmp_path)
    loaded = Restored(step=4, tag="global_step4")
    assert load_in_words(loaded, begun=steps.begun).startswith("the workers resume from step 4: ")
    steps.beat(0, Progress(step=12))
    assert load_in_words(loaded, begun=steps.begun).startswith("the workers have loaded step 4: ")


def test_the_number_of_all_steps_that_a_script_says_once_stays_known(tmp_path):
    clock = ManualClock()
    steps = Steps(HangPolicy(limit_s=5.0), clock)
    heartbeat = tmp_path / "heartbeat"
    steps.begin({0: heartbeat})
    steps.beat(0, Progress(step=7))
    assert steps.last.total_steps == 0
    heartbeat.write_text("3 total_steps=400")
    steps.too_slow()
    steps.beat(0, Progress(step=8))
    assert (steps.last.step, steps.last.total_steps) == (8, 400)
    steps.beat(0, Progress(step=9, total_steps=500))
    assert steps.last.total_steps == 500, "what its schedule says comes first"


def test_what_each_worker_did_before_its_first_step_of_a_round_has_its_time(tmp_path):
    steps, clock = begun(tmp_path)
    clock.advance(0.5)
    steps.prepares(0, Preparing(what="loading x", part=0.1))
    clock.advance(1.0)
    steps.prepares(0, Preparing(what="loading x", part=0.9))
    clock.advance(0.25)
    steps.prepares(0, Preparing(what="first step"))
    clock.advance(2.0)
    assert steps.ways == {}
    steps.beat(0, Progress(step=1))
    steps.beat(1)
    steps.prepares(0, Preparing(what="loading y"))
    steps.beat(0, Progress(step=2))
    assert steps.ways == {
        0: [("starting", 0.5), ("loading x", 1.25), ("first step", 2.0)],
        1: [("starting", 3.75)],
    }
    steps.begin({})
    assert steps.ways == {}
