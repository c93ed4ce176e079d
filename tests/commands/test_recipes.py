"""Every recipe of ``recipes/`` on as many ranks as its comment says, and the plans that the comment names."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hpczero.hf.adapter import CausalLMAdapter
from hpczero.options.config import DataOptions, RunConfig
from hpczero.options.environment import Environment
from hpczero.options.reading import load_toml
from hpczero.run.starting.building import made_by_factory
from hpczero.run.starting.precheck import mistake_of, model_config
from tests.helpers.mpirun import ROOT, run_command

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
LINE = re.compile(
    r"#   sbatch --nodes=(\d+) --ntasks-per-node=(\d+) --gpus-per-node=(\d+) slurm/train.sh (\S+)\n"
)
SIZES = {
    "llama-3-8b": ("Llama", 128256, 4096, 14336, 32, 8192),
    "llama-3-70b": ("Llama", 128256, 8192, 28672, 80, 8192),
    "mixtral-8x7b": ("Mixtral", 32000, 4096, 14336, 32, 32768),
}


def model_folder(library: Any, folder: Path) -> None:
    kind, vocabulary, hidden, inner, layers, positions = SIZES[folder.name]
    config = getattr(library, f"{kind}Config")(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=8,
        max_position_embeddings=positions,
        architectures=[f"{kind}ForCausalLM"],
    )
    config.save_pretrained(folder)


def test_every_recipe_is_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    assert len(RECIPES) >= 7
    for recipe in RECIPES:
        nodes, ranks, gpus, named = LINE.findall(recipe.read_text())[0]
        assert named == f"recipes/{recipe.name}"
        assert gpus == ranks
        sizes = {"NODES": nodes, "RANKS_PER_NODE": ranks, "GPUS_PER_NODE": gpus}
        shown = run_command(
            [os.fspath(ROOT / "slurm" / "train.sh"), os.fspath(recipe)],
            60,
            {**sizes, "DRY_RUN": "1", "TIME": "12:00:00", "CPUS_PER_RANK": "8"},
        ).ended()
        assert f"--nodes={nodes} --ntasks-per-node={ranks}" in shown.stdout, shown
        config = load_toml(recipe, RunConfig)
        model = None
        if config.model.factory:
            assert config.model.arguments is not None
            model_folder(library, Path(config.model.arguments.value["folder"]))
            adapter = made_by_factory(config.model)
            assert isinstance(adapter, CausalLMAdapter)
        else:
            model = model_config(config.model)
        # Its tokens are not here; all else is looked at as before a start on so many ranks.
        started = dataclasses.replace(config, data=DataOptions())
        environment = Environment(launched_rank=0, launched_ranks=int(nodes) * int(ranks))
        assert mistake_of(started, model, environment) is None, recipe


@pytest.mark.slow
def test_every_plan_of_a_recipe_is_one(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    for name in SIZES:
        model_folder(library, tmp_path / "models" / name)
    for recipe in RECIPES:
        plans = re.findall(r"#   (python -m hpczero\.plan .*)\n", recipe.read_text())
        assert plans
        for plan in plans:
            words = plan.replace("models/", f"{tmp_path}/models/").split()
            shown = run_command([sys.executable, *words[1:]], 120).ended()
            stage = load_toml(recipe, RunConfig).parallel.stage
            fits = re.search(r"^fits(.*)$", shown.stdout, re.MULTILINE)
            assert fits is not None
            assert fits[1].split()[stage] == "yes", (plan, shown)
