"""A misbehaving MCP server over its standard streams; its first argument selects the fault."""

import json
import os
import sys

MODE = sys.argv[1]


def tool(name, description):
    return {"name": name, "description": description, "inputSchema": {"type": "object", "properties": {}}}


def result_of(method, parameters):
    if method == "initialize":
        version = parameters["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
    if method == "tools/list":
        if MODE == "silent":
            return None
        if MODE == "pages" and not parameters.get("cursor"):
            return {"tools": [tool("other", "another tool")], "nextCursor": "2"}
        return {"tools": [tool("act", "x" * 300_000 if MODE == "long" else "acts")]}
    if MODE == "exit":
        os._exit(3)
    if MODE == "endless":
        while True:
            sys.stdout.write("x" * 65536)
    if MODE == "slow":
        return None
    contents = {
        "image": [{"type": "text", "text": "a"}, {"type": "image", "data": "AAAA", "mimeType": "image/png"}],
        "resource": [{"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}],
    }
    return {"content": contents.get(MODE, [{"type": "text", "text": "done"}]), "isError": False}


for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    answer = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] in ("initialize", "tools/list", "tools/call"):
        result = result_of(request["method"], request.get("params") or {})
        if result is None:
            continue
        answer["result"] = result
    else:
        answer["error"] = {"code": -32601, "message": "no such method"}
    print(json.dumps(answer), flush=True)
