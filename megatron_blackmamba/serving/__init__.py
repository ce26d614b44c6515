"""A model behind HTTP: an endpoint that OpenAI's clients understand, and a page to try the model."""
