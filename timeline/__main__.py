"""The command line."""

import argparse
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if not __package__:  # `python PATH/timeline`, from any folder
    sys.path[0] = ROOT
# torch's profiler would warn of memory that is older than the recording.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import timeline  # noqa: E402
from instruments import command  # noqa: E402


def parse_args() -> argparse.Namespace:
    parser = command.new_parser("timeline", timeline.__doc__)
    default = "(default: %(default)s)"
    add = parser.add_argument
    add("--steps", type=int, default=20, help=f"to record {default}")
    add("--steps-shown", type=int, default=1, help=f"in the picture {default}")
    add("--out", default="timeline", help=f"writes OUT.svg and OUT.json {default}")
    add("--nproc", type=int, help="processes (default: one per GPU; without a GPU, 2)")
    add("--patience", type=float, default=300, help=f"seconds to wait for a step {default}")
    add("--draw", nargs="+", metavar="FILE", help="draw these recordings, run nothing")
    args = command.read(parser)
    if problem := what_is_wrong(args):
        parser.error(problem)
    args.out = os.path.abspath(args.out)  # a program may change its folder
    return args


def what_is_wrong(args: argparse.Namespace) -> str:
    """Why this can't run; "" if it can."""
    if bool(args.draw) == bool(args.command):
        return "give a program, such as mnist_ddp.py --dataset synthetic, or --draw and recordings"
    if not 1 <= args.steps_shown <= args.steps:
        return "--steps must be at least 1, and --steps-shown between 1 and --steps"
    if not args.patience > 0 or (args.nproc is not None and args.nproc < 1):
        return "--nproc must be at least 1, and --patience greater than 0"
    folder = os.path.dirname(os.path.abspath(args.out))
    if not os.path.isdir(folder):
        return f"--out {args.out}: there is no folder {folder}"
    if not os.access(folder, os.W_OK):
        return f"--out {args.out}: the folder {folder} can't be written"
    return ""


def main() -> int:
    args = parse_args()
    from instruments.rank import leave  # imports torch: seconds
    from instruments.ranks import UsageError
    from timeline import show

    if args.draw:
        return show.draw_files(args.draw, args.out)
    try:
        code = show.record_and_show(args)
    except UsageError as problem:
        print(f"timeline: error: {problem}", file=sys.stderr)
        code = 2
    leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
