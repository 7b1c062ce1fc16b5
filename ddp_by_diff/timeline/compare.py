"""Brings the recordings together: one clock, which messages belong together, who came last."""

from collections import Counter, defaultdict

from ddp_by_diff.timeline.data import CoreWait, Message, Recording, ms

END_TOGETHER = ("allreduce", "allgather", "barrier")  # on all ranks at the same time


def earlier(recording: Recording, by: int) -> Recording:
    """The same, with all times `by` nanoseconds earlier."""
    cuts = [cut - by for cut in recording["cuts"]]
    trace = [event | {"begin": event["begin"] - by} for event in recording["trace"]]
    waits = [CoreWait(wait.time - by, wait.total) for wait in recording["core_waits"]]
    moved = {"cuts": cuts, "trace": trace, "core_waits": waits}
    for name in ("lane", "idle", "memory", "messages"):
        moved[name] = [one.earlier(by) for one in recording[name]]
    return recording | moved


def numbered(recording: Recording) -> dict[tuple, Message]:
    """A rank's messages by what is the same on all ranks that take part.

    That is the number in its group, if torch tells it; else it is the k-th of its kind in a step.
    """
    counts: Counter = Counter()
    messages = {}
    for message in recording["messages"]:
        kind, group, number = message.kind, message.group, message.number
        key: tuple = (kind, group, message.step if number is None else f"number {number}")
        if message.peer is not None:
            pair = (recording["rank"], message.peer)
            source, target = pair if kind == "send" else reversed(pair)
            key = ("sent", group, message.step, source, target)
        messages[(*key, counts[key, kind], kind)] = message
        counts[key, kind] += 1
    return messages


def align_clocks(recordings: list[Recording]) -> tuple[list[Recording], str]:
    """All ranks on one clock, and what was done; between machines all-reduces tell the time."""
    said = []
    first, *others = recordings
    aligned = [first]
    its_ends = ends_of(first)
    for recording in others:
        aligned.append(recording)
        if recording["machine"] == first["machine"]:
            continue
        rank, ends = recording["rank"], ends_of(recording)
        differences = sorted(ends[key] - its_ends[key] for key in ends if key in its_ends)
        if not differences:
            said.append(f"rank {rank} is on another machine, and its clock could not be compared")
            continue
        shift = differences[len(differences) // 2]
        quarter = len(differences) // 4
        uncertain = max(differences[-1 - quarter] - shift, shift - differences[quarter])
        than = "ahead of" if shift > 0 else "behind"
        said.append(
            f"rank {rank}'s clock was {ms(abs(shift))} ms {than} rank {first['rank']}'s, "
            f"give or take {ms(uncertain, 2)} ms"
        )
        aligned[-1] = earlier(recording, shift)
    return aligned, "; ".join(said)


def ends_of(recording: Recording) -> dict[tuple, int]:
    seen = {key: message for key, message in numbered(recording).items() if message.was_seen}
    return {key: message.end for key, message in seen.items() if key[0] in END_TOGETHER}


def match_messages(recordings: list[Recording]) -> tuple[list[Recording], list[dict]]:
    """The recordings, whose messages now know the rank that came last and until when they waited.

    And the arrows: from a send to the end of the wait for it.
    """
    together: dict[tuple, dict] = defaultdict(dict)
    for recording in recordings:
        for key, message in numbered(recording).items():
            together[key[:-1]][recording["rank"]] = message
    arrows = []
    known: dict[int, list[Message]] = defaultdict(list)
    for key, messages in together.items():
        if key[0] != "sent":
            last = max(messages, key=lambda rank: messages[rank].begin)
            begin = messages[last].begin
            for rank, message in messages.items():
                known[rank].append(message._replace(until=min(begin, message.end), last=last))
            continue
        _, _, step, source, target, _ = key
        if len(messages) == 2:
            begin, receive = messages[source].issued, messages[target]
            until = min(max(receive.begin, begin), receive.end)
            messages[target] = receive._replace(until=until, last=source)
            times = {"begin": begin, "end": receive.end}
            arrows.append({"step": step, "from": source, "to": target, **times})
        for rank, message in messages.items():
            known[rank].append(message)
    matched = []
    for recording in recordings:
        messages = sorted(known[recording["rank"]], key=lambda message: message.issued)
        matched.append(recording | {"messages": messages})
    return matched, arrows
