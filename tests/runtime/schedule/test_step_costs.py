from __future__ import annotations

import random

import pytest

from atom.runtime.schedule.step_costs import MAX_AGE, REFIT_EVERY, StepCosts, StepLoad, load_of
from atom.runtime.types import Plan, ScheduledRequest, Sequence
from atom.sampling_params import SamplingParams


def on_gpu(load: StepLoad) -> float:
    """Seconds: weights are read, or rows are computed, whichever takes longer."""
    return max(0.006, 0.003 + 2e-5 * (load.num_decodes + load.num_prompt)) + 2e-8 * load.context + 2e-10 * load.attended


def on_cpu(load: StepLoad) -> float:
    return 0.005 + 4e-4 * (load.num_decodes + load.num_prompt) + 1e-7 * load.context + 1e-8 * load.attended


def draw(rng: random.Random) -> StepLoad:
    decodes, prompt, start = rng.randint(0, 32), rng.choice([0, 64, 200, 500, 1000]), rng.randint(0, 8000)
    prompt = prompt if decodes else 2000
    return StepLoad(decodes, decodes * rng.randint(500, 3000), prompt, prompt * (start + prompt // 2))


@pytest.mark.parametrize("truth", [on_gpu, on_cpu])
def test_costs_are_learned_though_one_step_in_thirty_takes_ten_times_as_long(truth) -> None:
    rng = random.Random(5)
    costs = StepCosts(truth(StepLoad(16, 30000, 500, 10**6)))
    for number in range(200):
        load = draw(rng)
        costs.observe(load, truth(load) * rng.uniform(0.95, 1.05) * (1 if number % 30 else 10))
    errors = sorted(abs(costs.predict(load) / truth(load) - 1) for load in (draw(rng) for _ in range(100)))
    assert errors[50] < 0.04 and errors[95] < 0.12
    assert 1.0 <= costs.spread < 1.2


def test_more_work_never_takes_less_time_by_steps_that_say_so() -> None:
    costs = StepCosts(0.01)
    for prompt, seconds in ((0, 0.02), (64, 0.01), (128, 0.005), (256, 0.004)):
        costs.observe(StepLoad(4, 4000, prompt, prompt * 1000), seconds)
    predicted = [costs.predict(StepLoad(4, 4000, prompt, prompt * 1000)) for prompt in (0, 64, 128, 256, 512)]
    assert predicted == sorted(predicted) and 0.004 <= predicted[0] <= 0.02


def test_nothing_is_predicted_before_a_step_was_measured() -> None:
    costs = StepCosts(0.01)
    assert (costs.predict(StepLoad(4, 4000, 64, 9)), costs.spread, costs.max_prompt) == (0.0, 1.0, 0)


def test_a_size_that_was_not_seen_for_long_is_forgotten() -> None:
    costs = StepCosts(0.01)
    costs.observe(StepLoad(0, 0, 8000, 8000), 5.0)
    for _ in range(MAX_AGE - 1):
        costs.observe(StepLoad(2, 200, 64, 640), 0.01)
    costs.predict(StepLoad())
    assert costs.max_prompt == 8000
    for _ in range(REFIT_EVERY):
        costs.observe(StepLoad(2, 200, 64, 640), 0.01)
    costs.predict(StepLoad())
    assert costs.max_prompt == 64


def test_the_load_of_a_plan() -> None:
    a, b, c = (Sequence(id, list(range(100)), SamplingParams()) for id in "abc")
    decodes = [ScheduledRequest(a, 30, 1, True), ScheduledRequest(b, 40, 3, True, (7, 8))]
    plan = Plan([*decodes, ScheduledRequest(c, 10, 20, False)], 2)
    assert load_of(plan) == StepLoad(1 + 3, 31 + 43, 20, 20 * (10 + 10))
