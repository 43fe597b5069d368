"""Speed on a GPU: graphs, streams and masks. Results are the same without it."""
