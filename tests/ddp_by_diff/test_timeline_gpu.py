"""timeline/ on GPUs: traces as torch's profiler writes them, of kernels whose times are closed forms, where none is.

Times are microseconds, as in the traces.
"""

import json

import pytest

from ddp_by_diff.timeline.data import Noted, Span
from ddp_by_diff.timeline.events import recording_of
from ddp_by_diff.timeline.lanes import parts_of
from ddp_by_diff.timeline.say import message_sums
from ddp_by_diff.timeline.steps import table_of
from ddp_by_diff.timeline.why import why

THREAD = 7
PHASES = ("forward", "backward", "optimizer")


class Trace:
    """What a profiler has noted, in the place of one."""

    def __init__(self):
        self.events = []

    def kernel(self, launched, begin, end, name="kernel"):
        args = {"correlation": len(self.events)}
        self.span("cudaLaunchKernel", launched, launched + 1, "cuda_runtime", THREAD, args)
        self.span(name, begin, end, "kernel", 0, args)

    def call(self, begin, end, kind, number, group="0", **more):
        """As record_param_comms tells of a call of NCCL's."""
        args = {"Collective name": kind, "Process Group Name": group, "Seq": number, **more}
        self.span("record_param_comms", begin, end, "cpu_op", THREAD, args | {"In msg nelems": 2, "dtype": "Float"})

    def span(self, name, begin, end, category, thread, args):
        times = {"ts": begin, "dur": end - begin}
        self.events.append({"ph": "X", "name": name, "cat": category, "pid": 1, "tid": thread, "args": args} | times)

    def stop(self):
        pass

    def export_chrome_trace(self, file):
        with open(file, "w") as opened:
            json.dump({"traceEvents": self.events}, opened)


def recorded(trace, spans, cuts, rank=0, ranks=1):
    """The recording of a rank whose process did these spans: (what, begin, end)."""
    noted = Noted(rank, ranks, THREAD, 0, len(cuts) - 2, device="cuda")
    noted.spans = [Span(what, begin * 1000, end * 1000) for what, begin, end in spans]
    noted.cuts = [cut * 1000 for cut in cuts]
    noted.marks = [None] * len(cuts)
    return recording_of(noted, trace)


def lane(recording, begin, end):
    parts = parts_of(recording["lane"], begin * 1000, end * 1000)
    return [(part.what, part.begin / 1000, part.end / 1000) for part in parts]


def test_kernels_belong_where_they_were_launched_and_gpus_wait_where_only_messages_run():
    trace = Trace()
    for launched, begin, end, name in [
        (10, 110, 150, "conv"),
        (30, 150, 200, "conv_backward"),
        (35, 180, 300, "ncclDevKernel_AllReduce_Sum_f32"),
    ] + [(40, 230, 240, "conv_backward"), (60, 300, 310, "sgd"), (80, 320, 330, "conv")]:
        trace.kernel(launched, begin, end, name)
    trace.call(34, 37, "allreduce", 5)
    spans = [("forward", 5, 20), ("backward", 25, 50), ("optimizer", 55, 70)]
    spans.append(("forward", 38, 42))  # within backward, as activation checkpointing computes it again
    found = recorded(trace, spans, [0, 75])
    assert found["cuts"] == [0, 310_000]  # the step ends when what it has launched has ended
    assert lane(found, 100, 340) == [
        ("other", 100, 110),
        ("forward", 110, 150),
        ("backward", 150, 200),
        ("waiting", 200, 230),  # the next kernel is in the queue, behind the message
        ("forward", 230, 240),
        ("waiting", 240, 300),
        ("optimizer", 300, 310),
        ("other", 310, 340),
    ]
    (message,) = found["messages"]
    assert (message.begin, message.end, message.number, message.bytes) == (180_000, 300_000, 5, 8)
    assert not found["idle"]


TOO_SLOWLY = "the GPU has nothing to compute for 25.2 of 36.0 ms: kernels are launched too slowly, or none"


@pytest.mark.parametrize(("pause", "text"), [(280, TOO_SLOWLY), (100, "")])
def test_pauses_before_kernels_are_a_part_of_their_phase_and_named(pause, text):
    """In each phase Python launches 30 kernels, one in each 400 us, with a pause before each."""
    trace, spans, cuts, now = Trace(), [], [0], 0
    for _ in range(8):
        for what in PHASES:
            spans.append((what, now, now + 30 * 400))
            for _ in range(30):
                trace.kernel(now + pause - 8, now + pause, now + 400)
                now += 400
        cuts.append(now)
    table = table_of([recorded(trace, spans, cuts)])
    for step in table.ranks[0][1:]:
        assert step.spent == dict.fromkeys(PHASES, 30 * 400_000)
        assert sum(pause.length for pause in step.idle) == 90_000 * pause
    assert "; ".join(reason.text for reason in why(table)) == text


def test_a_pause_before_a_kernel_that_is_in_the_queue_is_no_pause_of_the_process():
    trace = Trace()
    for k in range(10):
        trace.kernel(10 + k, 100 + 50 * k, 140 + 50 * k)
    found = recorded(trace, [("forward", 0, 25), ("loading", 25, 1000)], [0, 25])
    assert lane(found, 100, 590) == [("forward", 100, 590)] and not found["idle"]


def test_pauses_while_the_process_loads_or_waits_are_loading_and_waiting():
    """60 of 66 ms for the next batch; in the second half of the steps the process waits until its GPU is done."""
    trace, spans, cuts, now = Trace(), [], [0], 0
    for _ in range(8):
        spans.append(("loading", now, now + 60_000))
        now += 60_000
        for what in PHASES:
            spans.append((what, now, now + 1_000))
            trace.kernel(now + 100, now + 200, now + 2_000)
            now += 2_000
        cuts.append(now)
    table = table_of([recorded(trace, spans, cuts)])
    assert why(table)[0].text == "the process spends 60.0 of 66.0 ms loading its next batch itself (num_workers=0)"
    assert table.ranks[0][5].spent["loading"] == 60_000_000
    trace.kernel(now, now + 10, now + 20)
    trace.span("cudaDeviceSynchronize", now + 30, now + 90, "cuda_runtime", THREAD, {})
    trace.kernel(now + 95, now + 95, now + 99)
    found = recorded(trace, [*spans, ("forward", now, now + 100)], [*cuts, now + 100])
    assert lane(found, now + 10, now + 99) == [
        ("forward", now + 10, now + 30),
        ("waiting", now + 30, now + 90),
        ("forward", now + 90, now + 99),
    ]


def test_a_message_beside_kernels_that_are_launched_slowly_is_not_what_holds_them_up():
    trace = Trace()
    trace.kernel(5, 10, 20)
    trace.call(20, 26, "allreduce", 1)
    trace.kernel(22, 25, 400, "ncclDevKernel_AllReduce_Sum_f32")
    trace.kernel(90, 100, 120)
    trace.kernel(95, 400, 410)  # it uses the message
    found = recorded(trace, [("backward", 0, 200)], [0, 200])
    assert lane(found, 10, 410) == [
        ("backward", 10, 90),
        ("waiting", 90, 100),
        ("backward", 100, 120),
        ("waiting", 120, 400),
        ("backward", 400, 410),
    ]
    assert [(pause.begin, pause.end) for pause in found["idle"]] == [(20_000, 90_000)]


def test_a_send_and_a_receive_name_the_other_rank():
    trace = Trace()
    trace.call(1, 4, "send", 1, **{"Dst Rank": 2})
    trace.kernel(2, 5, 9, "ncclDevKernel_SendRecv")
    trace.call(10, 14, "recv", 2, **{"Src Rank": 3})
    trace.kernel(12, 15, 19, "ncclDevKernel_SendRecv")
    found = recorded(trace, [], [0, 60], 0, 4)
    assert [(message.kind, message.peer) for message in found["messages"]] == [("send", 2), ("recv", 3)]


def test_messages_are_matched_by_group_and_number():
    """Rank 1's recorder saw a call more, and two calls are joined: when these ran is not seen."""
    found = []
    for rank in 0, 1:
        trace = Trace()
        if rank == 1:
            trace.call(1, 4, "allreduce", 2)
            trace.kernel(2, 5, 9, "ncclDevKernel_AllReduce_Sum_f32")
        trace.call(10, 14, "allreduce", 3)
        trace.kernel(12, 20 + 70 * rank, 100, "ncclDevKernel_AllReduce_Sum_f32")
        trace.call(30, 31, "allgather", 4)
        trace.call(32, 33, "allgather", 4)
        trace.kernel(36, 110, 150, "ncclDevKernel_AllGather")
        found.append(recorded(trace, [], [0, 60], rank, 2))
    table = table_of(found)
    waits = [step.waits_for[1] for (step,) in table.ranks.values()]
    assert waits == [70_000, 0], "from 20 to 90 us"
    (step,) = table.ranks[0]
    assert [message.last for message in step.messages][:1] == [1]
    text = "1 all-reduce, 8 B; 2 all-gathers, 16 B together; when 2 of them ran was not seen"
    assert message_sums({"messages": step.messages}) == text
