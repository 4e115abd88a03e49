"""What a job's comment opts in to, and that no text in it opts in to more than its writer meant."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_hooks.optin import TEXT_LIMIT, OptIn, parse

FULL = OptIn(
    mode="requeue",
    max_restarts=3,
    checkpoint="/data/run1/ckpt",
    logs=("/data/run1/*.log",),
    progress="/data/run1/step",
)


def test_the_list_of_keys_is_read() -> None:
    text = (
        "recovery=requeue,max_restarts=3,checkpoint=/data/run1/ckpt,"
        "logs=/data/run1/*.log,progress=/data/run1/step"
    )
    assert parse(text) == FULL
    assert parse(text.replace(",", " , ")) == FULL
    assert parse(f"'{text}'") == FULL


def test_the_same_as_json_is_read() -> None:
    wishes = {
        "mode": "requeue",
        "max_restarts": 3,
        "checkpoint": "/data/run1/ckpt",
        "logs": ["/data/run1/*.log"],
        "progress": "/data/run1/step",
    }
    assert parse(json.dumps({"recovery": wishes, "team": "vision"})) == FULL
    wishes["recovery"] = wishes.pop("mode")
    assert parse(json.dumps({"recovery": wishes})) == FULL


def test_scripts_written_for_nvidias_service_keep_working() -> None:
    text = '{"APS": {"auto_resume_mode": "requeue", "max_requeue_times": 3}}'
    assert parse(text) == OptIn(mode="requeue", max_restarts=3)
    wishes = parse('{"APS": {"auto_resume_mode": "singleton_dependency"}}')
    assert not wishes.opted_in
    assert "requeue" in wishes.problems[0]


@pytest.mark.parametrize(
    "text",
    [None, "", "nightly run 5", "project=vision,owner=ann", '{"team": "vision"}', "{not json", "0"],
)
def test_a_comment_about_something_else_is_no_opt_in_and_no_problem(text: str | None) -> None:
    assert parse(text) == OptIn()


@pytest.mark.parametrize("text", ["recovery=off", '{"recovery": "off"}'])
def test_an_owner_can_say_no(text: str) -> None:
    assert parse(text) == OptIn(mode="off")
    assert not parse(text).opted_in


def test_other_tools_words_may_stand_beside_ours() -> None:
    wishes = parse("project=vision,recovery=hold,night run")
    assert (wishes.mode, wishes.opted_in) == ("hold", True)


def test_quotes_keep_commas_in_paths() -> None:
    wishes = parse("""recovery=requeue,logs="/a,b/*.log",logs='/c d.log',checkpoint="/x=y" """)
    assert wishes.logs == ("/a,b/*.log", "/c d.log")
    assert wishes.checkpoint == "/x=y"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("recovry=requeue", "did you mean 'recovery'?"),
        ("recovery=reqeue", "did you mean 'requeue'?"),
        ("recovery=requeue,max_restart=1", "did you mean 'max_restarts'?"),
        ("recovery=requeue,log=/a", "did you mean 'logs'?"),
        ("recovery=requeue,max_restarts=lots", "whole number"),
        ("recovery=requeue,max_restarts=-1", "whole number"),
        ("recovery=requeue,max_restarts=99999", "whole number"),
        ("recovery=requeue,max_restarts=1,max_restarts=5", "twice"),
        ("recovery=requeue,checkpoint=", "path"),
        ("recovery=requeue,checkpoint=/a\x1b[2Jb", "control character"),
        ("recovery=requeue,checkpoint=/" + "a" * 2000, "longer"),
        ("recovery=requeue,noncritical=maybe", "true or false"),
        ("recovery=requeue,max_restarts", "cannot read"),
        ("recovery", "cannot read"),
        ('recovery=requeue,checkpoint="/a', "cannot read"),
        ('{"recovery": {"max_restart": 1}}', "did you mean 'max_restarts'?"),
        ('{"recovery": {"max_restarts": true}}', "whole number"),
        ('{"recovery": {"max_restarts": 1.0}}', "whole number"),
        ('{"recovery": {"mode": "requeue", "mode": "hold"}}', "twice"),
        ('{"recovery": ["requeue"]}', "object"),
        ('{"recovery": {"logs": [1]}}', "path"),
        ('{"recovery": {"mode": "requeue"}', "not valid JSON"),
        ('{"recovry": {"mode": "requeue"}}', "did you mean 'recovery'?"),
        ('{"APS": {"auto_resume_mod": "requeue"}}', "did you mean 'auto_resume_mode'?"),
        ('{"APS": {}}', "missing"),
        ('{"APS": ' + "[" * 3000, "not valid JSON"),
    ],
)
def test_a_mistake_opts_out_and_tells_the_owner_what_to_mend(text: str, advice: str) -> None:
    wishes = parse(text)
    assert not wishes.opted_in
    assert any(advice in problem for problem in wishes.problems), wishes.problems
    assert all(len(problem) < 300 and problem.isprintable() for problem in wishes.problems)


def test_a_comment_that_may_have_been_cut_is_not_believed() -> None:
    text = "recovery=requeue,checkpoint=/a,note=" + "x" * TEXT_LIMIT
    assert not parse(text).opted_in
    assert parse(text).problems
    assert parse("x" * TEXT_LIMIT) == OptIn()


PIECES = ("recovery", "APS", "=", ",", "requeue", "{", "}", '"', "'", ":", "max_restarts", "1", "[")


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5))).map("".join))
def test_no_text_breaks_the_reader(text: str) -> None:
    wishes = parse(text)
    assert all(problem.isprintable() for problem in wishes.problems)
    if wishes.opted_in:
        assert "requeue" in text or "hold" in text or "recovery" in text
