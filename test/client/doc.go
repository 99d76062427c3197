// Package client tests package client with servers, and a View with a model and with the blocks of engines. The tests of package
// client itself need no server: it is in a module without one.
package client
