// Package docs has tests of the documentation: links in its source, and the site that make docs builds in bin/docs.
package docs
