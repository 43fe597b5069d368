"""Speed on a GPU: graphs, streams and masks. Without it results are the same."""
