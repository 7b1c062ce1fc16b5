"""The command line."""

import argparse
import os
import sys

# torch's profiler would warn of memory that is older than the recording.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

from ddp_by_diff import timeline  # noqa: E402
from ddp_by_diff.instruments import command  # noqa: E402


def parse_args() -> argparse.Namespace:
    parser = command.new_parser("timeline", timeline.__doc__)
    default = "(default: %(default)s)"
    add = parser.add_argument
    add("--steps", type=int, default=20, help=f"number of steps to record {default}")
    add("--ops", action="store_true", help="also record PyTorch's operations, in OUT.json")
    add("--steps-shown", type=int, default=1, help=f"number of steps in the picture {default}")
    add("--out", default="timeline", help=f"write OUT.svg and OUT.json {default}")
    add("--nproc", type=int, help="number of processes (default: one per GPU, or 2 without a GPU)")
    command.add_timeout(parser, 300)
    add("--json", metavar="FILE", help="also write the figures to FILE, as JSON")
    add("--against", metavar="FILE", help="compare with a FILE of --json: exit with 1 if slower")
    add("--tolerance", type=float, default=5, help=f"accepted slowdown, in percent {default}")
    args = command.read(parser)
    args.out = command.output_path(parser, f"{args.out}.svg").removesuffix(".svg")
    args.json = args.json and command.output_path(parser, args.json)
    if not args.command:
        parser.error("give a program, such as mnist_ddp.py --dataset synthetic")
    if not 1 <= args.steps_shown <= args.steps:
        parser.error("--steps must be at least 1, and --steps-shown between 1 and --steps")
    if not args.timeout > 0 or not args.tolerance >= 0:
        parser.error("--timeout must be greater than 0, and --tolerance not negative")
    return args


def main() -> int:
    args = parse_args()
    from ddp_by_diff.instruments.rank import leave  # imports torch: seconds
    from ddp_by_diff.timeline import show

    args.before = args.against and show.read_before(args.against)
    code = show.record_and_show(args)
    leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
