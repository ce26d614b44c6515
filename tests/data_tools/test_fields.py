import pytest

from megatron_blackmamba.data_tools.fields import FieldError, text_of
from megatron_blackmamba.data_tools.rejects import MISSING_FIELD, NOT_A_STRING

RECORD = {
    "text": "plain",
    "a.b": "a dot in the name",
    "meta": {"title": "T", "year": 2023},
    "body": [{"text": "one"}, {"text": "two"}],
    "lines": ["x", "y"],
    "null": None,
    "gaps": [{"text": "a"}, {"text": None}],
}


@pytest.mark.parametrize(
    "fields, text",
    [
        (["text"], "plain"),
        (["a.b"], "a dot in the name"),
        (["meta.title"], "T"),
        (["body[].text"], "one|two"),
        (["lines[]"], "x|y"),
        (["meta.title", "body[].text"], "T|one|two"),
    ],
)
def test_text_comes_from_fields_or_paths(fields, text):
    assert text_of(fields, "|")(RECORD) == text


@pytest.mark.parametrize(
    "fields, reason, detail",
    [
        (["content"], MISSING_FIELD, "no `content`; it has `text`, `a.b`, `meta`"),
        (["meta.author"], MISSING_FIELD, "no `author`; there is `title`, `year`"),
        (["text.more"], MISSING_FIELD, "above `more` stands a string"),
        (["text", "content"], MISSING_FIELD, "no `content`"),
        (["null"], NOT_A_STRING, "`null` is null"),
        (["meta.year"], NOT_A_STRING, "`meta.year` is a number"),
        (["lines"], NOT_A_STRING, "`lines` is a list"),
        (["meta[].title"], NOT_A_STRING, "`meta` is an object, not a list"),
        (["body[]"], NOT_A_STRING, "an item is an object"),
        (["gaps[].text"], NOT_A_STRING, "an item is null"),
    ],
)
def test_record_without_the_field_lists_its_fields(fields, reason, detail):
    with pytest.raises(FieldError) as error:
        text_of(fields, "|")(RECORD)
    assert error.value.reason == reason and detail in error.value.detail
