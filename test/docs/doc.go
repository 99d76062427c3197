// Package docs has tests of the documentation.
package docs
