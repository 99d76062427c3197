// Package kubernetes starts a real Kubernetes API server for tests: kube-apiserver and etcd, as processes of their own.
// There are no kubelets and no controllers: pods and their status are what a test writes, and a Deployment has no pods.
//
// A test calls Start, which skips the test if a program is missing: `make kube-apiserver` builds bin/kube-apiserver and
// bin/kubectl, and etcd is Debian's package etcd-server. This package does not need client-go. With it, a test connects
// by clientcmd.BuildConfigFromFlags("", s.Kubeconfig).
package kubernetes
