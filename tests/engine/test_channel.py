"""The pipes between two processes: whole frames in their order, and an owner who never waits."""

from __future__ import annotations

import os
import queue
import threading

from engine.channel import Channel


def pair(start_writer: bool = True) -> tuple[Channel, int, queue.SimpleQueue[bytes | None]]:
    """A channel that sends into a pipe, the pipe's other end, and what the channel has received: here, of itself."""
    (read_end, write_end), received = os.pipe(), queue.SimpleQueue[bytes | None]()
    idle_read, idle_write = os.pipe()
    channel = Channel(os.fdopen(idle_read, "rb"), os.fdopen(write_end, "wb"), received.put, lambda: received.put(None))
    if start_writer:
        channel.start()
    os.close(idle_write)
    return channel, read_end, received


def reading(read_end: int) -> queue.SimpleQueue[bytes | None]:
    """What comes out of a pipe as frames, and None at its end."""
    received = queue.SimpleQueue[bytes | None]()
    _, unused = os.pipe()
    Channel(os.fdopen(read_end, "rb"), os.fdopen(unused, "wb"), received.put, lambda: received.put(None)).start()
    return received


def test_what_the_pipe_takes_is_written_at_once_by_whoever_sends() -> None:
    channel, read_end, _ = pair(start_writer=False)  # no thread of it runs
    channel.send(b"hello")
    assert os.read(read_end, 100) == b"\x05\0\0\0hello"


def test_a_slow_peer_makes_nobody_wait_and_gets_everything_in_order() -> None:
    channel, read_end, _ = pair()
    frames = [bytes([number]) * size for number, size in enumerate([10, 1_000_000, 1, 0x10000, 5, 300_000, 2])]
    for frame in frames:
        channel.send(frame)  # nobody reads: this would never return if it waited
    received = reading(read_end)
    assert [received.get(timeout=10) for _ in frames] == frames
    channel.close()
    assert received.get(timeout=10) is None


def test_frames_of_several_threads_stay_whole() -> None:
    channel, read_end, _ = pair()
    received = reading(read_end)
    senders = [
        threading.Thread(target=lambda letter=letter: [channel.send(letter * 50_000) for _ in range(20)])
        for letter in (b"a", b"b", b"c")
    ]
    for sender in senders:
        sender.start()
    frames = [received.get(timeout=10) for _ in range(60)]
    assert sorted(frames) == [b"a" * 50_000] * 20 + [b"b" * 50_000] * 20 + [b"c" * 50_000] * 20
    channel.close()


def test_frames_to_a_peer_that_is_gone_are_dropped() -> None:
    channel, read_end, _ = pair()
    channel.send(b"x" * 1_000_000)  # part of it waits for room when the peer goes
    os.close(read_end)
    for _ in range(3):
        channel.send(b"nobody")
    channel.close(timeout=10)
    channel.send(b"after the end")
    assert not channel._threads[1].is_alive()


def test_the_end_of_what_is_read_is_told_once() -> None:
    _, _, received = pair()
    assert received.get(timeout=10) is None
    assert received.empty()
