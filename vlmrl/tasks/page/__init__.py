"""The task `page`: the HTML and CSS of a web page that a picture shows."""
