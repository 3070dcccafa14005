"""How each role is spread over devices."""
