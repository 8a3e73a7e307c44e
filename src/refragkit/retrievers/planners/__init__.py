"""Query planners: what a question should ask next, given what its earlier hops found."""
