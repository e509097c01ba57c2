"""What `replayssm check` finds out about the plans of an engine, and compares with the torch target.

It imports no TensorRT: plans are reached through a session.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from replayssm.plugins.manifest import EngineDirectoryError
from replayssm.plugins.tensorrt_ops import OUTPUT_SUFFIX
from replayssm.runtime.engine import Engine
from replayssm.runtime.findings import Finding, attempt, model_error, relative_error
from replayssm.runtime.plan_executors import SegmentExecutor
from replayssm.runtime.plans import Plan
from replayssm.runtime.session import DraftRow, Row, Session

Tensor = torch.Tensor

POISON = 12345
RANDOM_PROMPTS = 3
LEAK_CALLS = 40
LEAK_BYTES = 8 << 20
"""Memory that may come into use while buckets repeat: allocators round, a leaked module is 1 MB a call."""


class PlanCheck:
    """Checks of one engine of plans on one device, all but `load` in the session that it opens.

    oracle: the same networks and weights for the torch target; None leaves out what needs them. prompts: token ids of
    real text. seed: of random prompts and choices.
    """

    session: Session

    def __init__(
        self,
        engine: Engine,
        device: torch.device | str,
        oracle: Engine | None = None,
        prompts: Sequence[Sequence[int]] = (),
        seed: int = 0,
    ) -> None:
        self.engine, self.oracle, self.device = engine, oracle, torch.device(device)
        self.settings = engine.manifest.replay
        self._random = random.Random(seed)
        longest = max(2, min(200, self.settings.max_seq_len // 3))
        lengths = [self._random.randint(2, longest) for _ in range(RANDOM_PROMPTS)]
        self.prompts = {
            "random prompts": [self.tokens(length) for length in lengths],
            "text prompts": [list(prompt)[:longest] for prompt in prompts if len(prompt)],
        }
        self.bound = model_error(engine.networks["main"], self.settings.activation_dtype)
        # Windows that fold the history into the checkpoint at least twice.
        self.steps = 2 * (self.settings.buffer_len + self.settings.max_window) + 4

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self.engine.vocab_size) for _ in range(count)]

    def run(self) -> Iterator[Finding]:
        """All findings; the later ones only if the plans can be loaded at all.

        Raises ValueError where they cannot be tried: TensorRT is missing, or the device is no GPU.
        """
        try:
            loaded = self.load()
        except (EngineDirectoryError, RuntimeError) as error:
            loaded = Finding("load", False, f"{type(error).__name__}: {' '.join(str(error).split())}")
        yield loaded
        if not loaded.passed:
            return
        for name, check in (
            ("aliasing", self.aliasing),
            ("state in place", self.state_in_place),
            ("repeated windows", self.repeated_windows),
            ("rejected windows", self.rejected_windows),
            ("batches", self.batches),
        ):
            yield attempt(name, check)
        for name, prompts in self.prompts.items():
            yield attempt(f"model, {name}", lambda name=name, prompts=prompts: self.model(f"model, {name}", prompts))
        yield attempt("draft head", self.draft_head)
        yield attempt("memory", self.memory)

    def load(self) -> Finding:
        """Inputs, outputs, profiles, streams and TensorRT's own word on aliases are compared when a session loads."""
        self.session = Session(self.engine, device=self.device, graphs=False)
        plans = self.plans
        return Finding("load", True, f"{len(plans)} plans with the networks' inputs, outputs and profiles")

    @property
    def plans(self) -> dict[str, Plan]:
        return next(iter(self.session.executors.values())).runtime.plans

    def aliasing(self) -> Finding:
        """Whether anything but its plugin touches a state tensor inside a plan."""
        tensors, copies = 0, []
        for executor in self.session.executors.values():
            if isinstance(executor, SegmentExecutor):
                return Finding("aliasing", None, "plans between kernels hold no state")
            for phase in executor.phases:
                layers = phase.plan.layers()
                if any(isinstance(layer, str) for layer in layers):
                    return Finding("aliasing", None, "a plan does not describe its layers: build it again")
                tensors += len(phase.aliases)
                copies += state_copies(layers, phase.aliases)
        mode = self.session.executors["main"].runtime.description.get("alias")
        measured = {"alias": mode, "tensors": tensors, "copies": copies}
        if copies:
            detail = f"{len(copies)} copies of state with --alias {mode}, such as {copies[0]}"
            return Finding("aliasing", False, f"{detail}: build with the other --alias", measured)
        return Finding("aliasing", True, f"no layer copies any of {tensors} state tensors (--alias {mode})", measured)

    def state_in_place(self) -> Finding:
        """From memory full of NaN, a prompt fills its own slot in every part, and no other slot."""
        session, name = self.session, "state in place"
        self._poison()
        slots = [session.allocate() for _ in range(min(2, session.slots))]
        logits = session.prefill(slots[-1], self.tokens(min(40, self.settings.max_seq_len - 1)))
        missing, touched = [], []
        for key, state in session.states.items():
            if key.startswith("mtp"):
                continue
            for part, tensor in state.tensors.items():
                if tensor.dtype.itemsize == 1:
                    continue
                poisoned = tensor.isnan() if tensor.is_floating_point() else tensor == POISON
                per_slot = poisoned.flatten(1).all(dim=1).tolist()
                if per_slot[slots[-1]]:
                    missing.append(f"{key}.{part}")
                if not all(per_slot[: slots[-1]] + per_slot[slots[-1] + 1 :]):
                    touched.append(f"{key}.{part}")
        for slot in slots:
            session.free(slot)
        if missing:
            return Finding(name, False, f"the state never reached {len(missing)} buffers, such as {missing[0]}")
        if touched:
            return Finding(name, False, f"other slots were written in {len(touched)} buffers, such as {touched[0]}")
        if not torch.isfinite(logits).all():
            return Finding(name, False, "memory that was NaN before reached the logits of a new sequence")
        return Finding(name, True, "a prompt fills its own slot from NaN, and no other")

    def _poison(self) -> None:
        """Fill all state with NaN, and positions with nonsense, as memory that was used before."""
        for state in self.session.states.values():
            for tensor in state.tensors.values():
                if tensor.dtype.itemsize > 1:
                    tensor.fill_(math.nan if tensor.is_floating_point() else POISON)

    def _start(self, session: Session, prompts: Sequence[Sequence[int]]) -> list[int]:
        slots = []
        for prompt in prompts:
            slots.append(session.allocate())
            session.prefill(slots[-1], prompt)
        return slots

    def _window(self, slot: int, logits: str = "all") -> Row:
        return Row(slot, self.tokens(self._random.randint(1, self.settings.max_window)), logits)

    def _fits(self, session: Session, slots: Sequence[int]) -> bool:
        return all(session.seq_len(slot) + self.settings.max_window <= self.settings.max_seq_len for slot in slots)

    def repeated_windows(self) -> Finding:
        """Design rule 2: the same window again gives the same bits, outputs and state."""
        session, name = self.session, "repeated windows"
        slots = self._start(session, self.prompts["random prompts"][: session.slots])
        count = 0
        while count < self.steps and self._fits(session, slots):
            rows = [self._window(slot) for slot in slots]
            first = session.step(rows)
            kept = [tensor[slots].clone() for state in session.states.values() for tensor in state.tensors.values()]
            again = session.step(rows)
            now = [tensor[slots] for state in session.states.values() for tensor in state.tensors.values()]
            same_state = all(torch.equal(_bits(a), _bits(b)) for a, b in zip(kept, now, strict=True))
            if not torch.equal(first.logits, again.logits) or not same_state:
                what = "state" if torch.equal(first.logits, again.logits) else "logits"
                return Finding(name, False, f"the {what} of a window changed when it ran again, after {count} windows")
            session.advance({row.slot: self._random.randint(1, len(row.tokens)) for row in rows})
            count += 1
        for slot in slots:
            session.free(slot)
        return Finding(name, True, f"{count} windows ran twice with the same bits", {"windows": count})

    def rejected_windows(self) -> Finding:
        """Design rule 1: a window that did not stand leaves nothing behind."""
        session, name = self.session, "rejected windows"
        if session.slots < 2:
            return Finding(name, None, "needs an engine of two sequences")
        prompt = self.prompts["random prompts"][0]
        slots = self._start(session, [prompt, prompt])
        worst, count = 0.0, 0
        while count < self.steps and self._fits(session, slots):
            session.step([self._window(slots[0])])
            tokens = self._window(slots[0]).tokens
            result = session.step([Row(slot, tokens, "all") for slot in slots])
            worst = max(worst, relative_error(result.row_logits(0), result.row_logits(1)))
            accepted = self._random.randint(1, len(tokens))
            session.advance(dict.fromkeys(slots, accepted))
            count += 1
        for slot in slots:
            session.free(slot)
        return self._judged(name, worst, f"{count} windows after a rejected one, beside a sequence without")

    def batches(self) -> Finding:
        """Every bucket computes what the smallest does: each row again, alone."""
        session, name = self.session, "batches"
        prompts = [self.tokens(3 + 5 * index) for index in range(session.slots)]
        prompts = [prompt[: self.settings.max_seq_len // 2] for prompt in prompts]
        slots = self._start(session, prompts)
        worst, size = 0.0, session.slots
        while size >= 1:
            rows = [self._window(slot) for slot in slots[:size]]
            together = session.step(rows)
            for index in sorted({0, size - 1}):
                alone = session.step([rows[index]]).row_logits(0)
                worst = max(worst, relative_error(together.row_logits(index), alone))
            size //= 2
        for slot in slots:
            session.free(slot)
        return self._judged(name, worst, f"rows of up to {session.slots} sequences, alone and together")

    def model(self, name: str, prompts: Sequence[Sequence[int]]) -> Finding:
        """The same tokens through the plans and through the torch target: every step's logits, and the state left."""
        if self.oracle is None:
            return Finding(name, None, "needs the weights: give --checkpoint")
        if not prompts:
            return Finding(name, None, "there are no prompts")
        self._poison()
        pair = (self.session, Session(self.oracle, self.session.slots, self.device, graphs=False))
        prompts = prompts[: self.session.slots]
        slots = self._start(pair[0], prompts)
        if slots != self._start(pair[1], prompts):
            raise RuntimeError("the two sessions gave different slots")
        worst, agreed, count, steps = 0.0, 0, 0, 0
        while steps < self.steps and self._fits(pair[0], slots):
            rows = [self._window(slot) for slot in slots]
            got, expected = (session.step(rows) for session in pair)
            worst = max(worst, relative_error(got.logits, expected.logits))
            agreed += int((got.logits.argmax(1) == expected.logits.argmax(1)).sum())
            count += len(expected.logits)
            accepted = {row.slot: self._random.randint(0, len(row.tokens)) for row in rows}
            for session in pair:
                session.advance(accepted)
            steps += 1
        part, state_error = self._state_difference(*pair, slots)
        for slot in slots:
            pair[0].free(slot)
        measured = {"state_error": state_error, "state_part": part, "greedy_agreement": agreed / count}
        finding = self._judged(name, worst, f"{count} logits in {steps} steps of {len(slots)} sequences", measured)
        if state_error > self.bound:
            detail = f"state {part} is off by {state_error:.2g} of its norm, at most {self.bound:.2g} is rounding"
            return Finding(name, False, detail, finding.measured)
        return finding

    def _state_difference(self, ours: Session, oracle: Session, slots: Sequence[int]) -> tuple[str, float]:
        """(the part that differs most, its relative error); positions and packed bytes must be equal."""
        worst = ("", 0.0)
        for key, state in oracle.states.items():
            if key.startswith("mtp"):
                continue
            for part, expected in state.tensors.items():
                a, b = ours.states[key][part][slots], expected[slots]
                if not a.is_floating_point() or a.dtype.itemsize == 1:
                    error = 0.0 if part != "checkpoint_position" or torch.equal(a, b) else math.inf
                else:
                    # What no sequence has written yet differs: the plans' session was poisoned.
                    known = ~a.isnan() & ~b.isnan()
                    error = relative_error((a * known)[None].nan_to_num(), (b * known)[None].nan_to_num())
                worst = max(worst, (f"{key}.{part}", error), key=lambda item: item[1])
        return worst

    def draft_head(self) -> Finding:
        name = "draft head"
        if "mtp" not in self.engine.networks:
            return Finding(name, None, "the engine has none")
        if self.oracle is None:
            return Finding(name, None, "needs the weights: give --checkpoint")
        oracle = Session(self.oracle, self.session.slots, self.device, graphs=False)
        prompt = self.prompts["random prompts"][0]
        slots = [session.allocate() for session in (self.session, oracle)]
        hidden = oracle.step([Row(slots[1], prompt, "last")]).hidden_states
        row = (prompt[1:], 0, hidden[:-1])
        got, expected = (
            session.draft_step([DraftRow(slot, *row)])
            for session, slot in zip((self.session, oracle), slots, strict=True)
        )
        self.session.free(slots[0])
        bound = model_error(self.engine.networks["mtp"], self.settings.activation_dtype)
        return self._judged(name, relative_error(got.logits, expected.logits), f"{len(prompt) - 1} tokens", bound=bound)

    def memory(self) -> Finding:
        """What the plans take, and whether repeated calls of all sizes take more and more (NVIDIA/TensorRT#4849)."""
        session, runtime = self.session, self.session.executors["main"].runtime
        slots = self._start(session, [self.tokens(2) for _ in range(session.slots)])

        def all_sizes() -> int:
            size = session.slots
            while size >= 1:
                session.step([Row(slot, self.tokens(1)) for slot in slots[:size]])
                size //= 2
            return runtime.used_bytes()

        before = all_sizes()
        for _ in range(LEAK_CALLS):
            after = all_sizes()
        for slot in slots:
            session.free(slot)
        measured = {**runtime.memory, "state": session.state_bytes, "growth": after - before}
        if after - before > LEAK_BYTES:
            detail = f"{(after - before) / 1e6:,.0f} MB more in use after {LEAK_CALLS} rounds of all batch sizes"
            return Finding("memory", False, f"{detail}: a leak", measured)
        detail = f"plans {measured['plans'] / 1e6:,.1f} MB, state {measured['state'] / 1e6:,.1f} MB, scratch "
        return Finding("memory", True, f"{detail}{measured['scratch'] / 1e6:,.1f} MB, no growth", measured)

    def _judged(
        self, name: str, error: float, what: str, measured: Mapping[str, Any] = {}, bound: float | None = None
    ) -> Finding:
        bound = self.bound if bound is None else bound
        numbers = {"relative_error": error, "bound": bound, **measured}
        verdict = "is rounding" if error <= bound else "is not: at most"
        text = f"{what}: off by {error:.2g} of the norm, which {verdict} ({bound:.2g})"
        return Finding(name, error <= bound, text, numbers)


def state_copies(layers: Sequence[Mapping[str, Any]], aliases: Mapping[str, str]) -> list[str]:
    """Layers of a plan that read or write a state tensor without being the one that updates it.

    aliases: output -> input of every state tensor. A tensor that no layer names counts as copied too: something else
    stands in its place.
    """
    readers: dict[str, list[str]] = {}
    writers: dict[str, list[str]] = {}
    for layer in layers:
        for side, found in (("Inputs", readers), ("Outputs", writers)):
            for tensor in layer.get(side, ()):
                found.setdefault(tensor["Name"], []).append(layer["Name"])
    copies = []
    for output, source in aliases.items():
        read, written = readers.get(source, []), writers.get(output, [])
        if len(read) != 1 or read != written:
            others = ", ".join(sorted({*read, *written})) or "no layer"
            copies.append(f"{output.removesuffix(OUTPUT_SUFFIX)} ({others})")
    return copies


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
