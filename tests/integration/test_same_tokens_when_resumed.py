"""A loss must not show in the tokens: requests that go on elsewhere with their output end as they would have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer
from support.byte_tokenizer import EOS, byte_tokenizer
from support.device_engine import DeviceEngine, device_engine, random_prompts
from support.engine_core import EngineCore, TokenLogprobs
from support.random_model import VOCAB_SIZE, write_config

from asyncengine.sampling import SamplingParams, Structured
from asyncengine.wire.base import Finish
from gpu_runner.grammar.child.compiler import Compiler
from gpu_runner.grammar.child.masks import Masks
from gpu_runner.schedule.mask_work import MaskWork

pytestmark = pytest.mark.timeout(300)

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "green"]}, "at": {"type": "integer", "minimum": 0, "maximum": 9999}},
    "required": ["kind", "at"],
    "additionalProperties": False,
}
MAX_TOKENS = 40
MIN_TOKENS = 21
REQUESTS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(seed=7, top_p=0.9, max_tokens=MAX_TOKENS, ignore_eos=True),
    # the bias would end it at once, if its least number of tokens did not
    "adjusted": SamplingParams(
        seed=-(2**63),
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.9,
        logit_bias=((EOS, 100.0), (5, 2.0), (77, -3.0)),
        min_tokens=MIN_TOKENS,
        max_tokens=MAX_TOKENS,
    ),
    "logprobs": SamplingParams(seed=9, logprobs=3, prompt_logprobs=1, max_tokens=MAX_TOKENS, ignore_eos=True),
    "choices": SamplingParams(n=3, seed=2**63 - 2, logprobs=0, max_tokens=MAX_TOKENS, ignore_eos=True),
    "structured": SamplingParams(
        seed=3, structured=Structured("json_schema", json.dumps(SCHEMA)), max_tokens=MAX_TOKENS
    ),
}
LENGTHS = (5, 40, 17, 33, 16, 9)
FIRST_RIDS = {"greedy": 0, "seeded": 10, "adjusted": 20, "logprobs": 30, "choices": 40, "structured": 50}
RIDS = [FIRST_RIDS[name] + choice for name, params in REQUESTS.items() for choice in range(params.n)]


class MaskedCore(EngineCore):
    """Makes the masks that the grammar process would make, at once."""

    def __init__(self, *, compiler: Compiler, device: Any, **options: Any) -> None:
        super().__init__(device=device, **options)
        masks = device.masks
        self._masks = Masks(compiler, fd=masks.fd, num_slots=len(masks.array), words=masks.words, threads=1)

    def make_masks(self, work: MaskWork) -> None:
        for row in work.opened:
            self._masks.open(row.slot, row.gen, row.structured, row.tokens)
        assert not any(self._masks.advance(work.slots, work.gens, work.tokens))
        super().make_masks(work)


class Cores:
    def __init__(self, engine: DeviceEngine) -> None:
        self._engine = engine
        tokenizer = LLTokenizer(byte_tokenizer().to_str(), n_vocab=32 * engine.executor.masks.words, eos_token=[EOS])
        self._compiler = Compiler(tokenizer)
        self.whole = self.fresh()
        prompts = random_prompts(list(LENGTHS), VOCAB_SIZE)
        for (name, params), prompt in zip(REQUESTS.items(), prompts, strict=True):
            self.whole.add_request(FIRST_RIDS[name], prompt, params)
        self.whole.run()

    def fresh(self) -> MaskedCore:
        executor = self._engine.executor
        return MaskedCore(
            compiler=self._compiler,
            num_pages=executor.num_pages,
            max_model_len=executor.max_model_len,
            max_num_seqs=self._engine.max_num_seqs,
            max_num_batched_tokens=executor.max_step_tokens,
            vocab_size=VOCAB_SIZE,
            eos_ids=executor.model_config.eos_ids,
            device=executor,
            check=False,
        )


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cores]:
    model = write_config(tmp_path_factory.mktemp("model"), num_hidden_layers=2, eos_token_id=EOS)
    options: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "max_num_seqs": 8, "step_tokens": 256}
    with device_engine(model, device="cpu", **options) as engine:
        yield Cores(engine)


def test_the_requests_are_what_they_are_meant_to_be(cores: Cores) -> None:
    core = cores.whole
    assert {rid: core.finish[rid] for rid in RIDS} == {
        **dict.fromkeys(RIDS, Finish.LENGTH),
        20: Finish.STOP,
        50: Finish.STOP,
    }
    assert len(core.outputs[20]) == MIN_TOKENS + 1
    assert json.loads(bytes(core.outputs[50][:-1])).keys() == {"kind", "at"}
    assert len({tuple(core.outputs[rid]) for rid in (40, 41, 42)}) == 3
    assert set(core.prompt_logprobs) == {30}


@pytest.mark.parametrize(("turns", "same_core"), [(7, False), (18, False), (11, True)])
def test_however_often_they_are_lost_they_end_with_the_tokens_of_an_undisturbed_run(
    cores: Cores, turns: int, same_core: bool
) -> None:
    """turns: of each life. same_core: only their rows are lost, as with a detokenizer."""
    whole = cores.whole
    logprobs: dict[int, list[TokenLogprobs]] = {rid: [] for rid in RIDS}
    core, now = cores.fresh(), {rid: rid for rid in RIDS}
    for name, first in FIRST_RIDS.items():
        core.add_request(first, whole.prompts[first], REQUESTS[name])
    lives = 1
    while True:
        for _ in range(turns):
            core.turn()
        for rid, own in now.items():
            logprobs[rid] += core.logprobs.pop(own, [])
        left = {rid: own for rid, own in now.items() if own not in core.finish}
        for rid in now.keys() - left.keys():
            assert core.outputs[now.pop(rid)] == whole.outputs[rid]
        if not left:
            break
        lost, core = core, core if same_core else cores.fresh()
        drop(lost, list(left.values()))
        for first in FIRST_RIDS.values():
            choices = [rid for rid in left if first <= rid < first + 10]
            for together in [choices] if lives % 2 else [[rid] for rid in choices]:
                if together:
                    own = 1_000 * lives + together[0]
                    core.resume(own, {left[rid]: MAX_TOKENS for rid in together}, of=lost)
                    now.update({rid: own + place for place, rid in enumerate(together)})
        lives += 1
        assert lives < MAX_TOKENS
    core.assert_nothing_held()
    assert lives >= 3
    for rid in RIDS:
        expected = whole.logprobs.get(rid, [])
        assert [list(tops) for _, tops in logprobs[rid]] == [list(tops) for _, tops in expected]
        assert flat(logprobs[rid]) == pytest.approx(flat(expected), abs=1e-5)


def test_a_row_that_goes_on_opens_with_what_it_came_with(cores: Cores) -> None:
    core = cores.fresh()
    core.add_request(30, cores.whole.prompts[30], REQUESTS["logprobs"])
    while len(core.outputs.get(30, [])) < 20:
        core.turn()
    drop(core, [30])
    core.resume(31, {30: 18})
    core.run()
    row = core.opens[31]
    assert (row.prompt_tokens, row.resumed) == (33, np.array(core.outputs[31][:18], np.int32).tobytes())
    assert row.prompt is None, "its prompt has been told of"
    assert core.opens[30].prompt is not None
    assert row.cached_tokens == 33, "of 48 tokens in the cache, those of the prompt"
    assert core.scheduler.counters.prefix_hit_tokens == 48


def drop(core: EngineCore, rids: list[int]) -> None:
    """End these, and take in what is in flight."""
    for rid in rids:
        core.abort(rid)
    core.run()
    core.assert_nothing_held()


def flat(logprobs: list[TokenLogprobs]) -> list[float]:
    return [value for chosen, tops in logprobs for value in (chosen, *tops.values())]
