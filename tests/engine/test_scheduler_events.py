"""What is told of a request, and counted."""

from __future__ import annotations

from engine.protocol import Finished, Progress, Submit, Tokens
from tests.engine.fake_model import expected_reply

PRESET = list(range(20, 50))


def test_the_whole_life_of_a_request_as_it_is_told(make_rig):
    rig = make_rig(max_batch_tokens=4)
    said = rig.scheduler.submit(rig_submit := _submit("r", [1, 2, 3, 4, 5, 6], 2))
    while not rig.scheduler.idle:
        rig.now += 1
        batch = rig.scheduler.schedule()
        said += rig.scheduler.take_events() + rig.scheduler.commit(batch, rig.model.run(batch))
    reply = expected_reply(rig_submit.token_ids, 2)

    def reading(read: int) -> Progress:
        return Progress(request_id="r", state="reading", reused=0, read=read, total=6)

    assert said[:5] == [
        reading(0),
        reading(4),
        reading(6),
        Tokens(request_id="r", index=0, token_ids=reply[:1]),
        Tokens(request_id="r", index=0, token_ids=reply[1:]),
    ]
    (end,) = said[5:]
    assert isinstance(end, Finished) and (end.reason, end.index, end.detail) == ("length", 0, "")
    assert (end.usage.queue_s, end.usage.first_token_s, end.usage.total_s) == (1, 2, 3)


def _submit(request_id, token_ids, max_tokens):
    return Submit(request_id=request_id, session_id="s", token_ids=token_ids, max_tokens=max_tokens)


def test_waiting_is_told_once_and_reading_each_step(make_rig):
    rig = make_rig(max_batch_tokens=10)
    rig.reply(PRESET[:13], 1)
    first = rig.submit([1] * 25, 2, session="a")
    second = rig.submit(PRESET, 1, session="b")
    rig.run()
    told = [(event.state, event.reused, event.read) for event in rig.progress[first]]
    assert told == [("reading", 0, 0), ("reading", 0, 10), ("reading", 0, 20), ("reading", 0, 25)]
    told = [(event.state, event.reused, event.read) for event in rig.progress[second]]
    assert told == [("waiting", 0, 0), ("reading", 13, 0), ("reading", 13, 5), ("reading", 13, 14), ("reading", 13, 17)]


def test_a_request_cancelled_while_it_waits_has_cost_nothing(make_rig):
    rig = make_rig()
    request = rig.submit([1, 2, 3], 2)
    rig.now += 5
    rig.cancel(request)
    usage = rig.finished[request][0].usage
    assert rig.usage(request) == (0, 0, 0, 0)
    assert (usage.prompt_tokens, usage.queue_s, usage.first_token_s, usage.total_s) == (0, 5, None, 5)


def test_a_snapshot_counts_blocks_and_requests(make_rig):
    rig = make_rig(blocks=16)
    rig.reply([1] * 9, 4, session="a")
    rig.submit([1] * 5 + [2] * 5, 4, session="b")
    rig.submit([1] * 5 + [2] * 5, 4, session="c")
    rig.step()
    assert rig.scheduler.snapshot_fields() == {
        "total_blocks": 16,
        "free_blocks": 11,
        "leased_blocks": 3,
        "idle_blocks": 2,
        "running": 1,
        "waiting": 1,
        "reused_tokens": 5,
        "sampled_tokens": 5,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "preemptions": 0,
        "evicted_blocks": 0,
    }
    rig.run()
    rig.scheduler.reset_counters()
    fields = rig.scheduler.snapshot_fields()
    assert [fields[name] for name in ("reused_tokens", "sampled_tokens", "preemptions", "evicted_blocks")] == [0] * 4


def test_an_empty_scheduler_has_nothing_to_say(make_rig):
    rig = make_rig()
    assert rig.scheduler.idle and rig.scheduler.schedule() is None and rig.scheduler.take_events() == []
    assert rig.scheduler.fail("nothing ran") == []
