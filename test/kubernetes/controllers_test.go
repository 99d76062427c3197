package kubernetes_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/kvcast/kvcast/test/kubernetes"
)

// controllers does what the controllers of a cluster do with the objects of a namespace, as far as commands wait for it: it creates the claims
// of StatefulSets, binds and resizes volumes, releases what is deleted, and reports that pods run and Jobs are complete. There are no pods.
type controllers struct {
	url, token, namespace string
	client                *http.Client
}

// controllerInterval is the time between two passes over all objects.
const controllerInterval = 50 * time.Millisecond

// startControllers starts controllers, which end with the test.
func startControllers(t *testing.T, s *kubernetes.APIServer, namespace string) {
	t.Helper()
	certificates, err := os.ReadFile(s.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(certificates)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}
	c := &controllers{url: s.URL, token: s.Token, namespace: namespace, client: &http.Client{Transport: transport}}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	var last error // of the last pass; an object may change while it is handled
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			if err := c.pass(ctx); ctx.Err() == nil {
				last = err
			}
			select {
			case <-time.After(controllerInterval):
			case <-ctx.Done():
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		transport.CloseIdleConnections()
		if last != nil {
			t.Errorf("controllers: %v", last)
		}
	})
}

// manifest is a Kubernetes object.
type manifest map[string]any

// get returns a nested value; nil if there is none.
func (m manifest) get(path ...string) any {
	var v any = map[string]any(m)
	for _, key := range path {
		inner, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = inner[key]
	}
	return v
}

func (m manifest) name() string { return m.get("metadata", "name").(string) }

func (m manifest) isDeleted() bool { return m.get("metadata", "deletionTimestamp") != nil }

// Paths of the resources.
func (c *controllers) resource(group, kind string) string {
	return "/" + group + "/namespaces/" + c.namespace + "/" + kind
}

const volumes = "/api/v1/persistentvolumes"

func (c *controllers) claims() string { return c.resource("api/v1", "persistentvolumeclaims") }

func (c *controllers) pass(ctx context.Context) error {
	for _, step := range []struct {
		resource string
		handle   func(context.Context, string, manifest) error
	}{
		{c.resource("apis/apps/v1", "statefulsets"), c.statefulSet},
		{c.resource("apis/apps/v1", "deployments"), c.workload},
		{c.resource("apis/batch/v1", "jobs"), c.job},
		{c.claims(), c.claim},
		{volumes, c.volume},
	} {
		var list struct{ Items []manifest }
		if err := c.call(ctx, http.MethodGet, step.resource, nil, &list); err != nil {
			return err
		}
		for _, object := range list.Items {
			path := step.resource + "/" + object.name()
			handle := step.handle
			if object.isDeleted() {
				handle = c.release
			}
			if err := handle(ctx, path, object); err != nil {
				return err
			}
		}
	}
	return nil
}

// release lets a deleted object go: nothing uses it, and what it owns is orphaned.
func (c *controllers) release(ctx context.Context, path string, object manifest) error {
	if object.get("spec", "volumeName") != nil { // a claim
		volume := volumes + "/" + object.get("spec", "volumeName").(string)
		var v manifest
		if err := c.call(ctx, http.MethodGet, volume, nil, &v); err != nil {
			return err
		}
		if v.get("spec", "persistentVolumeReclaimPolicy") == "Delete" && !v.isDeleted() {
			if err := c.call(ctx, http.MethodDelete, volume, nil, nil); err != nil {
				return err
			}
		}
	}
	return c.patch(ctx, path, manifest{"metadata": manifest{"finalizers": nil}})
}

// statefulSet creates the claims of a StatefulSet.
func (c *controllers) statefulSet(ctx context.Context, path string, object manifest) error {
	for i := range int(object.get("spec", "replicas").(float64)) {
		for _, template := range object.get("spec", "volumeClaimTemplates").([]any) {
			claim := maps.Clone(manifest(template.(map[string]any)))
			name := fmt.Sprintf("%s-%s-%d", claim.name(), object.name(), i)
			claim["metadata"] = manifest{"name": name, "labels": object.get("spec", "selector", "matchLabels")}
			delete(claim, "status")
			err := c.call(ctx, http.MethodPost, c.claims(), claim, nil)
			if err != nil && !isConflict(err) {
				return err
			}
		}
	}
	return c.workload(ctx, path, object)
}

// workload reports that all pods of a StatefulSet or Deployment are ready.
func (c *controllers) workload(ctx context.Context, path string, object manifest) error {
	n := object.get("spec", "replicas")
	status := manifest{
		"observedGeneration": object.get("metadata", "generation"), "replicas": n, "readyReplicas": n, "availableReplicas": n, "updatedReplicas": n,
	}
	if object.get("spec", "volumeClaimTemplates") != nil {
		revision := fmt.Sprintf("%s-%v", object.name(), object.get("metadata", "generation"))
		status["currentRevision"], status["updateRevision"], status["currentReplicas"] = revision, revision, n
	}
	return c.patch(ctx, path+"/status", manifest{"status": status})
}

// job reports that a Job is complete.
func (c *controllers) job(ctx context.Context, path string, object manifest) error {
	if object.get("status", "completionTime") != nil {
		return nil
	}
	now := time.Now().UTC().Format(time.RFC3339)
	condition := func(kind string) manifest { return manifest{"type": kind, "status": "True"} }
	return c.patch(ctx, path+"/status", manifest{"status": manifest{
		"startTime": now, "completionTime": now, "succeeded": 1, "uncountedTerminatedPods": manifest{},
		"conditions": []manifest{condition("SuccessCriteriaMet"), condition("Complete")},
	}})
}

// claim binds a PersistentVolumeClaim to the volume that it names, or to a new one, and gives the volume the size that the claim requests.
func (c *controllers) claim(ctx context.Context, path string, object manifest) error {
	size := object.get("spec", "resources", "requests", "storage")
	if object.get("status", "phase") == "Bound" && object.get("status", "capacity", "storage") == size {
		return nil
	}
	name := object.get("spec", "volumeName")
	if name == nil {
		name = "pvc-" + object.get("metadata", "uid").(string)
		err := c.call(ctx, http.MethodPost, volumes, manifest{"metadata": manifest{"name": name}, "spec": manifest{
			"capacity": manifest{"storage": size}, "accessModes": object.get("spec", "accessModes"),
			"storageClassName": object.get("spec", "storageClassName"), "persistentVolumeReclaimPolicy": "Delete",
			"csi": manifest{"driver": "test.example", "volumeHandle": name},
		}}, nil)
		if err != nil && !isConflict(err) {
			return err
		}
		if err := c.patch(ctx, path, manifest{"spec": manifest{"volumeName": name}}); err != nil {
			return err
		}
	}
	volume := volumes + "/" + name.(string)
	var v manifest
	if err := c.call(ctx, http.MethodGet, volume, nil, &v); err != nil {
		return err
	}
	reference := manifest{"kind": "PersistentVolumeClaim", "namespace": c.namespace, "name": object.name(), "uid": object.get("metadata", "uid")}
	if uid := v.get("spec", "claimRef", "uid"); uid != nil && uid != reference["uid"] {
		return nil // the volume is another claim's: this one is pending
	}
	if err := c.patch(ctx, volume, manifest{"spec": manifest{"claimRef": reference, "capacity": manifest{"storage": size}}}); err != nil {
		return err
	}
	return c.patch(ctx, path+"/status", manifest{"status": manifest{
		"phase": "Bound", "capacity": manifest{"storage": size}, "accessModes": object.get("spec", "accessModes"),
	}})
}

func (c *controllers) volume(context.Context, string, manifest) error { return nil }

// statusError is an answer that is no success.
type statusError struct {
	status int
	text   string
}

func (e *statusError) Error() string { return e.text }

func isConflict(err error) bool {
	e, ok := err.(*statusError) //nolint:errorlint // call returns it as it is
	return ok && e.status == http.StatusConflict
}

func (c *controllers) patch(ctx context.Context, path string, change manifest) error {
	return c.call(ctx, http.MethodPatch, path, change, nil)
}

// call calls the API server, and decodes the answer unless it is nil.
func (c *controllers) call(ctx context.Context, method, path string, body manifest, answer any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, method, c.url+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+c.token)
	request.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		request.Header.Set("Content-Type", "application/merge-patch+json")
	}
	response, err := c.client.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	text, err = io.ReadAll(response.Body)
	switch {
	case err != nil:
		return err
	case response.StatusCode >= http.StatusMultipleChoices:
		return &statusError{response.StatusCode, fmt.Sprintf("%s %s: %s: %s", method, path, response.Status, text)}
	case answer == nil:
		return nil
	}
	return json.Unmarshal(text, answer)
}
