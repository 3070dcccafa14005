"""An MCP server with three tools, over its standard streams."""

import os

from mcp.server.mcpserver import MCPServer

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def secret() -> str:
    """Return a text; this tool is not in the list of allowed tools."""
    return "secret"


if __name__ == "__main__":
    server.run("stdio")
