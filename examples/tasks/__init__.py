"""Tasks of the quickstart and the recipes, each a source of rows: addition, programs, pictures, games with tools."""
