"""The built-in task of a tuned run reports facts of a site's records."""

import importlib.util

import pytest

if not importlib.util.find_spec("transformers"):
    pytest.skip("needs the extra hf", allow_module_level=True)

import tiny_base
from client_sides import Sides

from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.tune.site import RecordSite as Site
from fsl_async.roles.sync.delta import BALANCE


@pytest.mark.parametrize("evaluator", ["", "judge"])
def test_the_balance_of_labels_is_a_weight_unless_an_evaluator_looks(tmp_path, evaluator):
    """With one, a site of one label would be tried as almost nothing; and a site may lie."""
    data = tmp_path / "mine.csv"
    data.write_text("text,label\na cold night,no\nwarm bread,yes\ndeep blue sea,no\n")
    tune = {"method": "lora", "objective": "classify", "labels": "no,yes", "targets": "query"}
    tune["base"] = str(tiny_base.write_bert(tmp_path / "base"))
    config = {"tune": tune, "guard": {"evaluator": evaluator}}
    sides = Sides(publishes=True)
    context = ClientContext("a", config=config | {"data": {"path": str(data), "holdout": 0.0}})
    fed = Fed(sides.training, context)
    Site(fed, fed.settings.tune)
    reported = sides.training.facts["task"]() if "task" in sides.training.facts else {}
    assert (BALANCE in reported) == (not evaluator)
