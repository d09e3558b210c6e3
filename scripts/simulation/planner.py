"""Figures of fleets of any size under one traffic."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from simulation.fleet import Played, Scaling, play
from simulation.records import Target
from simulation.replica import ReplicaConfig
from simulation.router import Router
from simulation.sample import run_sample
from simulation.step_model import StepModel
from simulation.traffic import Traffic
from simulation.work import WorkModel

SEARCH_FACTOR = 32
"""No more replicas are tried than so many times those that have the time for all the work."""


class Planner:
    """bound: as of `Router`. good: what a good interactive request keeps within. sample: replicas that run the real
    scheduler."""

    def __init__(
        self,
        traffic: Traffic,
        config: ReplicaConfig,
        model: StepModel,
        *,
        scaling: Scaling,
        bound: float,
        good: Target,
        sample: int,
        seed: int,
    ) -> None:
        self._traffic, self._config, self._model = traffic, config, model
        self._scaling, self._bound, self._good, self._sample, self._seed = scaling, bound, good, sample, seed
        self._work = WorkModel(
            model, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        requests = traffic.requests
        self._request_ns = np.array([self._work.ns(each.prompt_tokens, each.output_tokens) for each in requests])
        interactive = np.array([each.terms.service_class == "interactive" for each in requests])
        self._interactive = int(interactive[traffic.source].sum())
        self._output_tokens = int(np.array([each.output_tokens for each in requests])[traffic.source].sum())

    def bounds(self) -> tuple[int, int]:
        """The replicas that have the time for all the work, and the most that are worth a try."""
        low = self._without_a_pause(int(self._request_ns[self._traffic.source].sum()))
        most = SEARCH_FACTOR * low
        if self._traffic.names or self._scaling.is_reactive:
            played = self.play(most)
            low = self._without_a_pause(played.work_ns)
            most = played.peak
        return min(low, most), most

    def _without_a_pause(self, work_ns: int) -> int:
        return max(1, math.ceil(work_ns / int(self._traffic.at_ns[-1])))

    def play(self, most: int) -> Played:
        scaling = self._scaling._replace(most=most, least=min(most, self._scaling.least))
        block_tokens = self._traffic.requests[0].block_tokens
        router = Router(
            self._work,
            bound=self._bound,
            block_tokens=block_tokens,
            cache_blocks=self._config.kv_cache_tokens // block_tokens if self._config.prefix_caching else 0,
        )
        first = self._traffic.at_ns.searchsorted(scaling.window_ns)
        first_ns = int(self._request_ns[self._traffic.source[:first]].sum())
        return play(self._traffic, router, scaling, first_ns=first_ns)

    def figures(self, most: int) -> tuple[dict[str, Any], Played]:
        """Times in ms. What is not of the sample is of the whole fleet. utilisation: work per time of the replicas that
        were up; device_busy: the time in which there was a step, however small. TTFT, TPOT, gaps and good ones are of
        interactive requests; background_done_s: how long after the last arrival the sample's background requests had
        all ended, None if it has none."""
        began = time.process_time()
        played = self.play(most)
        sample = run_sample(self._traffic, played, self._config, self._model, count=self._sample, seed=self._seed)
        own = sample.records.figures({"interactive": self._good, "background": self._good})
        counted = own.get("classes", {"interactive": own})["interactive"]
        late = sample.records.end[sample.records.is_background & sample.records.ran]
        lives = [played.lives[replica] for replica in sample.replicas]
        up_ns = sum(max(life.off, done) - life.up for life, done in zip(lives, sample.done_ns, strict=True))
        seconds = played.end_ns / 1e9
        sampled = {
            "replicas": len(sample.replicas),
            **{name: own[name] for name in ("requests", "refused", "ended")},
            **{name: counted.get(name) for name in ("ttft_ms", "tpot_ms", "gap_ms")},
            # what was refused is not good
            "good_share": counted.get("good_share", 0.0) * counted["ended"] / counted["requests"],
            "background_done_s": max(0.0, int(late.max() - self._traffic.at_ns[-1]) / 1e9) if len(late) else None,
            "hit_rate": own.get("hit_rate", 0.0),
            "preemptions": sample.preemptions,
            "device_busy": sample.busy_ns / max(1, up_ns),
        }
        figures = {
            "most": most,
            "replicas_mean": sum(life.off - life.ordered for life in played.lives) / played.end_ns,
            "replicas_peak": played.peak,
            "gpu_hours": played.gpu_hours,
            "seconds": seconds,
            "requests": len(self._traffic),
            "requests_per_s": len(self._traffic) / seconds,
            "output_tokens_per_s": self._output_tokens / seconds,
            "goodput_per_s": sampled["good_share"] * self._interactive / seconds,
            "utilisation": played.work_ns / sum(max(0, life.off - life.up) for life in played.lives),
            "sample": sampled,
            "cpu_s": time.process_time() - began,
        }
        return figures, played
