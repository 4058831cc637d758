"""`langchain-openai`, unchanged, against a whole service: its chat models and completions.

It has no tool that makes pictures.
"""

from __future__ import annotations

import pytest

from tests.serve.service.clients.reports import Report, report_of
from tests.serve.services import Service
from tests.tools import install_python

PACKAGE = "langchain-openai==1.7.3"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def report(running: Service, tmp_path_factory: pytest.TempPathFactory) -> Report:
    packages = install_python(tmp_path_factory.mktemp("langchain"), PACKAGE)
    return report_of("langchain_calls", packages, running.url, tmp_path_factory.mktemp("home"))


def test_it_answers(report: Report) -> None:
    answer = report["invoke"]
    assert answer["text"].startswith("a red circle") and answer["reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0


def test_streams_say_the_same(report: Report) -> None:
    whole, stream = report["batch"][0], report["stream"]
    assert "".join(stream) == whole and len(stream) > 3
    assert report["async"] == [whole, whole]


def test_a_stream_counts_its_tokens_if_asked(report: Report) -> None:
    (usage,) = [each for each in report["usage"] if each]
    assert usage["output_tokens"] > 3


def test_a_batch_answers_in_order(report: Report) -> None:
    red, green = report["batch"]
    assert red.startswith("a red circle") and green.startswith("a green star")


def test_a_conversation_goes_on(report: Report) -> None:
    assert report["talk"].startswith("a green circle")


def test_limits_hold(report: Report) -> None:
    assert report["short"]["reason"] == "length"
    assert report["short"]["usage"]["output_tokens"] == 3


def test_texts_are_completed(report: Report) -> None:
    assert report["completion"] and "".join(report["completion stream"]) == report["completion"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tools", "tools is not a field here"),
        ("schema", "response_format: the backend 'transformers' cannot be made to write JSON"),
        ("picture", "a part of type 'image_url' is not possible"),
        ("model", "The model 'gpt-4o' does not exist; here is 'mini-llm'"),
    ],
)
def test_what_is_not_here_is_refused_in_words(report: Report, name: str, message: str) -> None:
    assert message in report[name]["message"]
    kind = "NotFoundError" if name == "model" else "BadRequestError"
    assert kind in report[name]["error"]
