"""What guessing ahead is worth on real prompts: ``python -m tests.bench.speculation [--device 0] [MODEL]``.

Twenty prompts, four of each kind, are answered greedily by a daemon for each mode. Prints for each mode the
tokens of a step (the mean over all of them, and by kind), seconds of decoding beside those without
guesses, and how many answers are those without guesses, token by token; where one differs, from which token
on. Without --exact the CPU may differ where two tokens are equally good up to rounding.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from slotd.client.fetch import resolve_model
from slotd.client.text import TextTools
from tests.fakes.daemon_process import DaemonProcess

PROMPTS: dict[str, tuple[str, ...]] = {
    "chat": (
        "My neighbour plays the drums every evening. How do I raise it without a quarrel?",
        "I have two free days in a town by the sea in November. What would you do there?",
        "What should I ask before I adopt an older dog?",
        "I keep forgetting names at parties. Any advice?",
    ),
    "code": (
        "Write a Python function that returns the longest run of equal elements in a list.",
        "Write a JavaScript function that groups an array of orders by customer and sums their totals.",
        "Show a C function that reverses a singly linked list in place.",
        "Write a SQL query for the three best-selling products of each month.",
    ),
    "maths": (
        "A tank holds 240 litres and loses 3 litres an hour. After how many hours is it a quarter full?",
        "Explain why the sum of two odd numbers is even.",
        "Solve 3x + 7 = 2x + 19 step by step.",
        "A train covers 180 km in 2.5 hours. What is its mean speed, and how far does it get in 4 hours?",
    ),
    "summary": (
        "Summarise in three sentences: Bees find their way by the sun. On cloudy days they see the "
        "polarisation of the light instead. A bee that has found flowers dances on the comb: the angle "
        "of the dance gives the direction, its length the distance. Others follow the dancer in the "
        "dark and fly out by what they felt.",
        "Summarise as bullet points: The library opens at nine on weekdays and at ten on Saturdays. "
        "Members may borrow twelve books for four weeks. Late books cost ten cents a day. Rooms can be "
        "booked for two hours.",
        "Sum up the main point: Tides are caused by the pull of the moon and, less, of the sun. When "
        "both pull in line, at new and full moon, tides are highest; at half moon they are lowest.",
        "Shorten this: The old mill was built of stone from the quarry across the river. It ground "
        "flour for two hundred years, burned down twice, was rebuilt each time, and is now a museum "
        "that schools visit.",
    ),
    "writing": (
        "Write a short letter to a landlord about a heater that does not work.",
        "Write the opening of a story that takes place in a railway station at night.",
        "Write a product description for a folding kayak.",
        "Write a thank-you note to a teacher who retires.",
    ),
}

#: For one answer, in seconds: on a small machine with other work.
PATIENCE = 1800.0

MODES = ("off", "chain", "tree", "ngram", "auto")


@dataclass
class Answer:
    """One answer and its counts."""

    ids: list[int]
    seconds: float
    accepted: int

    @property
    def steps(self) -> int:
        """Steps of decoding: each gives one token beside those that it accepts, the prompt the first one."""
        return len(self.ids) - 1 - self.accepted


def answers(model: Path, flags: list[str], prompts: list[list[int]], n_gen: int) -> list[Answer]:
    """One after the other, behind one that warms everything up."""
    found = []
    with DaemonProcess(model, *flags) as daemon:
        daemon.generate(prompts[0][:-1], 32, "", "warm", timeout=PATIENCE)
        for number, ids in enumerate(prompts):
            tokens, done = daemon.generate(ids, n_gen, "", f"r{number}", timeout=PATIENCE)
            parts = ("decode_s", "draft_s", "verify_s", "sample_s", "emit_s")
            seconds = sum(float(str(done.fields[part])) for part in parts)
            found.append(Answer(tokens, seconds, int(str(done.fields["accepted"]))))
    return found


def tokens_a_step(found: list[Answer]) -> float:
    """Over all steps of all answers."""
    steps = sum(answer.steps for answer in found)
    return 1 + sum(answer.accepted for answer in found) / max(steps, 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.speculation", description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--draft", help="in place of the model's own")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["off", "chain", "tree", "auto"])
    parser.add_argument("-n", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--of-kind", type=int, default=4, help="prompts of each kind")
    given = parser.parse_args()
    model = Path(resolve_model(given.model, fetch=given.model is None))
    text = TextTools(model)
    kinds = [kind for kind, of_kind in PROMPTS.items() for _ in of_kind[: given.of_kind]]
    prompts = [
        text.tokenizer.encode(text.template.render([{"role": "user", "content": prompt}]))
        for of_kind in PROMPTS.values()
        for prompt in of_kind[: given.of_kind]
    ]
    shared = [f"--device={given.device}", "--max-ctx=2048", *(["--exact"] if given.exact else [])]
    shared += [f"--draft={given.draft}"] if given.draft else []
    plain: list[Answer] = []
    for mode in given.modes if given.modes[0] == "off" else ["off", *given.modes]:
        found = answers(model, [*shared, f"--spec={mode}"], prompts, given.n)
        plain = plain or found
        tokens, seconds = sum(len(answer.ids) for answer in found), sum(answer.seconds for answer in found)
        before = sum(answer.seconds for answer in plain)
        same = sum(answer.ids == other.ids for answer, other in zip(found, plain, strict=True))
        print(
            f"{mode}: {tokens_a_step(found):.2f} tokens a step, {tokens / seconds:.1f} tok/s, "
            f"{before / seconds:.2f}x, {same} of {len(found)} answers the same"
        )
        by_kind = {
            kind: tokens_a_step([a for a, of in zip(found, kinds, strict=True) if of == kind])
            for kind in dict.fromkeys(kinds)
        }
        if mode != "off":
            print("  " + ", ".join(f"{kind} {value:.2f}" for kind, value in by_kind.items()))
        for number, (answer, other) in enumerate(zip(found, plain, strict=True)):
            if answer.ids != other.ids:
                at = next(
                    (
                        i
                        for i, pair in enumerate(zip(answer.ids, other.ids, strict=False))
                        if len(set(pair)) > 1
                    ),
                    min(len(answer.ids), len(other.ids)),
                )
                print(f"  prompt {number} differs from token {at} on")


if __name__ == "__main__":
    main()
