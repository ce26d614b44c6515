import json

import pytest

from megatron_blackmamba.serving.completion import Limits, Refused, accept, parse


@pytest.mark.parametrize(("status", "kind"), [(499, "invalid_request_error"), (500, "server_error")])
def test_errors_say_whose_fault_they_are(status, kind):
    assert Refused("no", status).body["error"]["type"] == kind


@pytest.mark.parametrize(("options", "sent"), [(None, False), ({}, False), ({"include_usage": True}, True)])
def test_streams_have_usage_only_on_request(options, sent):
    request = parse(json.dumps({"prompt": [1], "stream": True, "stream_options": options}).encode())
    assert accept(request, None, Limits(), "tiny", None).include_usage is sent


@pytest.mark.parametrize("option", ["max_new_tokens", "max_completion_tokens"])
def test_options_of_other_programs_are_answered_with_ours(option):
    with pytest.raises(Refused, match=rf"{option}: unknown option; did you mean max_tokens\?"):
        parse(json.dumps({"prompt": "a", option: 5}).encode())
