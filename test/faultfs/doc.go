// Package faultfs is a file system for tests, on Linux: it keeps its files in another directory, and asks the test before
// each operation that changes them. The test can fail the operation, let only a part of it happen, or kill the program that
// asks for it.
package faultfs
