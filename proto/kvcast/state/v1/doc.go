// Package statev1 has the messages kvcast.state.v1, in which kvcast stores state beside a durable journal. They are not part of
// the contract with routers. buf generates them from the .proto files in this folder, and the numbers of the fields that kvcast
// encodes or reads without generated code.
package statev1
