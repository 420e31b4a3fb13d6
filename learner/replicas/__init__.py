"""Several learners, each with a share of the journal, that meet once in a while (DiLoCo): over a network that may
fail, or over an object store alone."""
