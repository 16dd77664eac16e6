"""The roles' contracts: defaults and argument specs agree, the program's files are where the role looks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

ROLES = Path(__file__).parents[3] / "roles"


def load(role: str, name: str) -> Any:
    return yaml.safe_load((ROLES / role / name).read_text())


@pytest.mark.parametrize("role", ["thermal", "kernel"])
def test_defaults_and_argument_specs_name_the_same(role: str) -> None:
    options = load(role, "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    defaults = load(role, "defaults/main.yml")
    assert sorted(options) == sorted(defaults)
    for name, option in options.items():
        if "default" in option:
            assert option["default"] == defaults[name], name


def test_tune_minfree_trap_is_never_a_default() -> None:
    assert load("kernel", "defaults/main.yml")["kernel_sysctls"] == {}
    for path in (ROLES / "kernel").rglob("*.yml"):
        tasks = "\n".join(line for line in path.read_text().splitlines() if not line.strip().startswith("#"))
        assert "min_free_kbytes:" not in tasks, path


def test_programs_of_the_role_are_there() -> None:
    role = ROLES / "thermal"
    for path in load("thermal", "vars/main.yml")["__thermal_programs"]:
        assert Path(path.replace("{{ role_path }}", str(role))).is_file(), path


def test_the_program_imports_nothing_else() -> None:
    """It runs alone on the node: whatever its files import is of the standard library or lies beside them."""
    import ast
    import sys

    shipped = [
        Path(p.replace("{{ role_path }}", str(ROLES / "thermal")))
        for p in load("thermal", "vars/main.yml")["__thermal_programs"]
    ]
    beside = {path.stem for path in shipped}
    for path in shipped:
        tree = ast.parse(path.read_text())
        guarded = [node for test in ast.walk(tree) if isinstance(test, (ast.Try, ast.If)) for node in ast.walk(test)]
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if name.startswith("ansible_collections"):
                    assert node in guarded, f"{path.name}: {name}"
                else:
                    assert name.partition(".")[0] in sys.stdlib_module_names | beside, f"{path.name}: {name}"


def test_the_configuration_is_json_whatever_the_type_of_a_variable() -> None:
    """With -e every value is text; the program wants numbers."""
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    variables = {
        **load("thermal", "defaults/main.yml"),
        **load("thermal", "vars/main.yml"),
        "thermal_cpu_cap_mhz": "3000",
    }
    variables |= {"thermal_gpu_clock_max_mhz": "2100", "thermal_metrics_url": "", "thermal_report_dir": ""}

    def trusted(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: trusted(item) for key, item in value.items()}
        if isinstance(value, list):
            return [trusted(item) for item in value]
        return trust_as_template(value) if isinstance(value, str) else value

    template = trust_as_template((ROLES / "thermal/templates/tuning.json.j2").read_text())
    text = Templar(loader=DataLoader(), variables=trusted(variables)).template(template)
    config = text if isinstance(text, dict) else json.loads(text)
    assert config["cpu"] == {"governor": "auto", "cap_mhz": 3000}
    assert (config["gpu"]["max_mhz"], config["gpu"]["timeout_s"]) == (2100, 10)
