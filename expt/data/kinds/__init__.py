"""The kinds of datasets, a module each; see expt.data.kind."""
