"""Tasks of lm-evaluation-harness on a model in shards: rank 0 runs the harness, and all ranks score what it asks.

world rank 0: lm_eval -> rows of tokens -> broadcast | all: each its rows, one forward -> gathered | ... -> results
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hpczero.errors import ConfigError
from hpczero.lazy import library
from hpczero.zero.access import finish_update
from hpczero.zero.zeroify import sharding

if TYPE_CHECKING:
    from hpczero.data.tokenize import Tokenizer

MOST_NEW = 256  # tokens of a generated text where a task does not say; as in lm_eval


Row = tuple[Sequence[int], Sequence[int]]  # what the model sees, and the targets of its last places
Scored = tuple[
    float, bool, int
]  # log probability of the targets, whether each is likeliest, likeliest next id


class SharedScorer:
    """Scores rows of tokens by all ranks together. Collective over the world of the model's topology."""

    def __init__(self, model: nn.Module, *, context: int, micro_batch: int) -> None:
        """Not collective.

        Args:
            model: zeroified; called with tokens (B, T) it gives logits (B, T, V), or an object that has them.
            context: most tokens of one forward.
            micro_batch: rows of one rank in one forward.
        """
        self.context, self._model, self._micro_batch = context, model, micro_batch
        self._topology = sharding(model).topology
        self._device = next(model.parameters()).device
        self.is_under_way = False

    def ask(self, rows: Sequence[Row]) -> list[Scored]:
        """The scores of ``rows``. World rank 0 calls it, while the others follow."""
        size = self._topology.data.size * self._micro_batch
        found: list[Scored] = []
        self.is_under_way = True
        for begin in range(0, len(rows), size):
            text = json.dumps(rows[begin : begin + size])
            found += self._round(self._topology.broadcast_text(text))
        self.is_under_way = False
        return found

    def follow(self) -> str:
        """Score what rank 0 asks until it ends; returns what it ended with. All other ranks call it."""
        while (text := self._topology.broadcast_text("")).startswith("["):
            self._round(text)
        return text

    @torch.no_grad()
    def _round(self, text: str) -> list[Scored]:
        rows, data = json.loads(text), self._topology.data
        mine = rows[data.rank :: data.size] or [
            ([0], [])
        ]  # without rows, for the collectives of a forward
        length = max(len(seen) for seen, _ in mine)
        # Attention looks back, so what follows a row does not change it.
        padded = [[*seen, *[0] * (length - len(seen))] for seen, _ in mine]
        output = self._model(torch.tensor(padded, dtype=torch.int64, device=self._device))
        found: list[Scored] = []
        for logits_TV, (seen, targets) in zip(getattr(output, "logits", output), mine, strict=True):
            last_TV = logits_TV[len(seen) - max(len(targets), 1) : len(seen)]
            likely_TV = last_TV.float().cpu().log_softmax(dim=-1)
            best_T = likely_TV.argmax(dim=-1).tolist()
            total = sum(likely_TV[at, target].item() for at, target in enumerate(targets))
            found.append((total, best_T == targets, best_T[-1]))
        told = self._topology.world.gather_text(json.dumps([data.rank, found]))
        shares = dict(json.loads(each) for each in told)
        return [tuple(shares[at % data.size][at // data.size]) for at in range(len(rows))]


def _lm_eval(module: str) -> Any:
    return library(f"lm_eval.{module}", "evaluation.lm_eval", "'lm_eval>=0.4.13'")


def harness_model(scorer: SharedScorer, tokenizer: Tokenizer) -> Any:
    """An ``lm_eval.api.model.TemplateLM`` over ``scorer``, for world rank 0. Not collective; its calls are."""
    base: Any = _lm_eval("api.model").TemplateLM
    utils = _lm_eval("utils")

    class ShardedLM(base):  # type: ignore[misc]
        """A model in shards as lm_eval sees it."""

        @property
        def eot_token_id(self) -> int:
            return tokenizer.separator

        def tok_encode(self, string: str, *ignored: Any, **named: Any) -> list[int]:
            ids: list[int] = np.asarray(tokenizer.encode(string.encode())).tolist()
            return ids

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **named: Any) -> list[tuple[float, bool]]:
            rows = []
            for _, context, targets in requests:
                if len(targets) > scorer.context:
                    raise ConfigError(
                        f"lm_eval: a continuation has {len(targets)} tokens, and the model sees {scorer.context} at "
                        "once; leave this task out"
                    )
                rows.append(((context + targets)[-scorer.context - 1 : -1], targets))
            return [(total, is_greedy) for total, is_greedy, _ in self._in_order(rows)]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
            rows, counts = [], []
            for (text,) in (request.args for request in requests):
                windows = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=scorer.context,
                    context_len=1,
                )
                parts = [utils.make_disjoint_window(window) for window in windows]
                rows += [(context + targets[:-1], targets) for context, targets in parts]
                counts.append(len(parts))
            each = iter(self._in_order(rows))
            return [sum(next(each)[0] for _ in range(count)) for count in counts]

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
            texts = [GrowingText(scorer.context, tokenizer, *request.args) for request in requests]
            while growing := [text for text in texts if not text.is_done]:
                scored = scorer.ask([(text.ids[-scorer.context :], []) for text in growing])
                for text, (_, _, token) in zip(growing, scored, strict=True):
                    text.add(token)
            return [text.text for text in texts]

        @staticmethod
        def _in_order(rows: list[tuple[list[int], list[int]]]) -> Iterator[Scored]:
            """Scores of rows, of which those of like length share a forward."""
            order = sorted(range(len(rows)), key=lambda at: -len(rows[at][0]))
            scored = dict(zip(order, scorer.ask([rows[at] for at in order]), strict=True))
            return (scored[at] for at in range(len(rows)))

    return ShardedLM()


class GrowingText:
    """A text that the model writes, always the likeliest token, until a stop of its task. Not collective.

    Attributes:
        ids: of the prompt, and what was written.
        text: what was written, without the stop.
        is_done: whether it ends here.
    """

    def __init__(
        self, context: int, tokenizer: Tokenizer, prompt: str, options: Mapping[str, Any]
    ) -> None:
        """``options``: of the task (``generation_kwargs``).

        Raises:
            ConfigError: the task draws its tokens, or wants more of them than the model has places.
        """
        if options.get("do_sample", options.get("temperature", 0) > 0):
            raise ConfigError(
                "lm_eval: a task wants its tokens drawn (do_sample, temperature), and texts are the likeliest ones "
                "here; set do_sample: false in the task"
            )
        until = options.get("until") or []
        self._stops = [until] if isinstance(until, str) else [*until]
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        self._most = next((int(options[name]) for name in names if name in options), MOST_NEW)
        if self._most >= context:
            raise ConfigError(
                f"lm_eval: a task wants up to {self._most} new tokens, and the model sees {context} at once; set a "
                "smaller max_gen_toks in the task"
            )
        ids = np.asarray(tokenizer.encode(prompt.encode())).tolist() or [tokenizer.separator]
        self.ids: list[int] = ids[self._most - context :]
        self._tokenizer, self._begin = tokenizer, len(self.ids)
        self.text, self.is_done = "", False

    def add(self, token: int) -> None:
        """Append one token."""
        self.ids.append(token)
        written = self.ids[self._begin :]
        text = self._tokenizer.decode(written).decode(errors="replace")
        self.text = min(
            (text.split(stop)[0] for stop in self._stops if stop), key=len, default=text
        )
        ends = token == self._tokenizer.separator or len(written) >= self._most
        self.is_done = ends or self.text != text


def evaluate(
    model: nn.Module,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    context: int,
    folder: str | Path | None = None,
    micro_batch: int = 1,
    limit: int | None = None,
) -> dict[str, float]:
    """Metrics of tasks of lm-evaluation-harness, by the weights in shards. Collective over the model's world.

    Rank 0 runs the harness; data sets need lie there alone. The others wait for it, up to HPCZERO_TIMEOUT at a time.
    Requests are shared among the ranks that train on different samples. The model is in eval mode meanwhile.

    Args:
        model: zeroified; called with tokens (B, T) it gives logits (B, T, V), or an object that has them.
        tokenizer: one of ``hpczero.data.tokenize``, or with its ``separator``, ``encode`` and ``decode``.
        tasks: names.
        context: most tokens of one forward.
        folder: with the YAML files of the tasks; None: those that come with lm_eval.
        micro_batch: requests of one rank in one forward.
        limit: samples of each task; None: all.

    Returns:
        On every rank, by ``task/metric``, such as ``"mine/acc"``; with a filter ``"mine/exact_match,strict-match"``.

    Raises:
        ConfigError: lm_eval is not installed, or the harness failed; on every rank.
    """
    scorer = SharedScorer(model, context=context, micro_batch=micro_batch)
    topology, was_training = sharding(model).topology, model.training
    finish_update(model)
    model.eval()
    if topology.is_root:
        try:
            text = json.dumps({"found": _run(scorer, tokenizer, tasks, folder, limit)})
        except Exception as error:  # of the harness, of any kind
            if scorer.is_under_way:  # the others are in a forward, and find no message
                raise
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        topology.broadcast_text(text)
    else:
        text = scorer.follow()
    model.train(was_training)
    told = json.loads(text)
    if "error" in told:
        raise ConfigError(f"lm_eval: tasks {', '.join(tasks)}: {told['error']}").on_all_ranks()
    found: dict[str, float] = told["found"]
    return found


def check_tasks(
    tokenizer: Tokenizer, tasks: Sequence[str], folder: str | Path | None = None
) -> None:
    """Refuse what ``evaluate`` could not do, before a training begins. Not collective: rank 0 calls it.

    Raises:
        ConfigError: lm_eval is not installed, or knows no task of a name.
        DataError: the tokens of the run came without their tokenizer.
    """
    tokenizer.encode(b"text"), tokenizer.separator
    known = _tasks_of(folder).all_tasks
    if unknown := [task for task in tasks if task not in known]:
        raise ConfigError(
            f"evaluation.lm_eval: no task is called {', '.join(unknown)} {f'in {folder}' if folder else 'in lm_eval'}; "
            f"known are {', '.join(known[:8])}{' and others' if known[8:] else ''}"
        )


def _tasks_of(folder: str | Path | None) -> Any:
    return _lm_eval("tasks").TaskManager(
        include_path=None if folder is None else str(folder), include_defaults=folder is None
    )


def _run(
    scorer: SharedScorer,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    folder: str | Path | None,
    limit: int | None,
) -> dict[str, float]:
    """On rank 0."""
    results = _lm_eval("evaluator").simple_evaluate(
        model=harness_model(scorer, tokenizer),
        tasks=[*tasks],
        task_manager=_tasks_of(folder),
        limit=limit,
        bootstrap_iters=0,  # standard errors are not asked for
        log_samples=False,
        # The streams of random numbers are those of training, and of all ranks alike.
        random_seed=None,
        numpy_random_seed=None,
        torch_random_seed=None,
    )["results"]
    found = {}
    for task, metrics in results.items():
        for name, value in metrics.items():
            if isinstance(value, float | int) and "_stderr" not in name and "," in name:
                found[f"{task}/{name.removesuffix(',none')}"] = float(value)
    return found
