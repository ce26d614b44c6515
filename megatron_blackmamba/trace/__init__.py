"""From a step of a run to the documents in its batch, and from a document to the steps that read it."""
