"""One decode step of a KDA layer between its projections."""
