"""`python -m gpu_runner`: the process that owns the model, the KV cache and the scheduler."""

from __future__ import annotations

from asyncengine.config import GrammarConfig, SidecarConfig
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.sidecar import Reporter, run_sidecar


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    # Imported here: torch takes seconds, and the life-line must be armed and the start reported before that.
    reporter.progress("importing torch")
    from asyncengine.wire.accounting import RingWriter, StepRecord
    from asyncengine.wire.row_notes import RowNotes
    from gpu_runner.accounting import StepAccount
    from gpu_runner.device.build import build_executor
    from gpu_runner.grammar.gate import GrammarGate
    from gpu_runner.inbox import Inbox
    from gpu_runner.loop import Loop
    from gpu_runner.outbox import Outbox
    from gpu_runner.schedule.limits import QueueLimits
    from gpu_runner.schedule.scheduler import Scheduler, num_slots_for
    from gpu_runner.warm_up import warm_up

    engine = config.engine
    executor = build_executor(
        engine, config.model_path, reporter.progress, num_slots=num_slots_for(engine.max_num_seqs)
    )
    reporter.progress("warming up")
    warm_up(executor, max_model_len=executor.max_model_len, max_step_tokens=executor.max_step_tokens)
    scheduler = Scheduler(
        num_pages=executor.num_pages,
        max_model_len=executor.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=executor.max_step_tokens,
        eos_ids=executor.model_config.eos_ids,
        policy=engine.scheduling_policy,
        enable_prefix_caching=engine.enable_prefix_caching,
        gap_ns={
            "interactive": round(1e6 * engine.interactive_gap_ms),
            "background": round(1e6 * engine.background_gap_ms),
        },
        host_pages=executor.host_pages,
        page_load_ns=executor.page_load_ns,
        session_pin_share=engine.session_pin_share,
    )
    grammar = None
    if executor.model_config.eos_ids and executor.masks.readable:
        grammar_config = GrammarConfig(
            model_path=config.model_path,
            run_dir=config.run_dir,
            eos_ids=executor.model_config.eos_ids,
            mask_fd=executor.masks.fd,
            num_slots=executor.num_slots,
            mask_words=executor.masks.words,
            life=config.life,
        )
        grammar = GrammarGate(pipes=pipes, rows=scheduler.masked_rows, config=grammar_config)
    outbox = Outbox(pipes=pipes, detokenizers=engine.detokenizer_workers, life=config.life, lives=config.lives)
    notes = RowNotes(config.run_dir, num_slots=scheduler.slots.num_slots)
    scheduler.slots.latest_rid = notes.rids
    inbox = Inbox(
        pipes=pipes,
        scheduler=scheduler,
        outbox=outbox,
        vocab_size=executor.model_config.vocab_size,
        limits=QueueLimits(engine.max_queued_requests, engine.max_queued_tokens),
        grammar=grammar,
        life=config.life,
        trial_note=notes.trial,
    )
    loop = Loop(
        scheduler=scheduler,
        executor=executor,
        inbox=inbox,
        outbox=outbox,
        reporter=reporter,
        account=StepAccount(RingWriter(config.run_dir, config.role, config.index, StepRecord)),
        grammar=grammar,
    )
    loop.prepare()
    loop.heartbeat()  # first, so that whoever hears "ready" has gauges
    reporter.ready(executor.info)
    try:
        loop.run()
    finally:
        if grammar is not None:
            grammar.close()
        executor.close()


if __name__ == "__main__":
    run_sidecar("gpu_runner", serve)
