"""What an engine has done so far, in counts; the tests assert through them that an event took place.

engine.metrics.num_output_tokens, engine.metrics.scheduler.num_preemptions
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from atom.runtime.scheduler import SchedulerStats


@dataclass
class Metrics:
    scheduler: SchedulerStats
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
