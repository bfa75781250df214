"""``python -m torsh_trainer.testing.fuzzing``: draws combinations and tells what they came to."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from torsh_trainer.testing.fuzzing.drawing import NATIVE, draw
from torsh_trainer.testing.fuzzing.record import write_range
from torsh_trainer.testing.fuzzing.trial import SILENT, Fuzzer


def main() -> int:
    """Returns the exit code: 1 where a result was wrong without a word."""
    parser = argparse.ArgumentParser(prog="python -m torsh_trainer.testing.fuzzing")
    parser.add_argument("--combinations", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the number to begin with")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--strategies", nargs="+", default=NATIVE, metavar="NAME")
    parser.add_argument("--show", action="store_true", help="every combination, not the wrong ones")
    parser.add_argument(
        "--record", type=Path, help="a JSON file that keeps the figures of this range"
    )
    options = parser.parse_args()
    verdicts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    wrong: list[str] = []
    began = time.monotonic()
    with Fuzzer() as fuzzer:
        for number in range(options.first, options.first + options.combinations):
            drawn = draw(number, processes=options.processes, strategies=options.strategies)
            outcome = fuzzer.try_one(drawn)
            verdicts[outcome.verdict] += 1
            if outcome.verdict == "refused":
                reasons[outcome.why] += 1
            if options.show or outcome.verdict in SILENT:
                print(f"{outcome.verdict}: {outcome.why}\n  {drawn}", flush=True)
            if outcome.verdict in SILENT:
                wrong.append(f"{outcome.verdict}: {outcome.why}: {drawn}")
    if options.record:
        write_range(options.record, options.first, options.combinations, verdicts, wrong)
    print(f"{options.combinations} combinations in {time.monotonic() - began:.0f} s:", end=" ")
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    for reason, count in reasons.most_common():
        print(f"  {count} x {reason}")
    return int(any(verdicts[verdict] for verdict in SILENT))


if __name__ == "__main__":
    sys.exit(main())
