package kubernetes_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/kubernetes"
)

const (
	storageClasses = `kubectl apply --filename - <<'EOF'
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: standard, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: test.example
allowVolumeExpansion: true
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: fast}
provisioner: test.example
EOF
`
	installed = `cat >values.yaml <<'EOF'
journal:
  store: file
  file: {size: 10Gi}
EOF
helm install kvcast deploy/helm/kvcast --namespace llm --values values.yaml
kubectl wait persistentvolumeclaim/journal-kvcast-0 --namespace llm --for=jsonpath='{.status.phase}'=Bound --timeout 2m
`
	removed = `helm uninstall kvcast --namespace llm
kubectl delete persistentvolumeclaim --namespace llm --selector app.kubernetes.io/instance=kvcast
`
	// claim prints the size and the class of the claim, and the class and size that the StatefulSet has for claims.
	claim = `kubectl get persistentvolumeclaim journal-kvcast-0 --namespace llm --output jsonpath='{.status.phase} {.status.capacity.storage} {.spec.storageClassName}'
kubectl get statefulset kvcast --namespace llm --output jsonpath='; {.spec.volumeClaimTemplates[0].spec.resources.requests.storage} {.spec.volumeClaimTemplates[0].spec.storageClassName}'
`
)

// TestCommandsOfUpgrades executes the commands of docs/upgrades.md.
func TestCommandsOfUpgrades(t *testing.T) {
	testclass.Packaging(t)
	requireCharts(t)
	s := kubernetes.Start(t)
	w := newWalk(t, s)
	w.run("kubectl create namespace llm\n" + storageClasses)
	startControllers(t, s, "llm")
	w.run(installed)
	const upgrade, rollback, resize, class, copied, bound = 0, 1, 2, 3, 4, 5
	all := blocks(t, "docs/upgrades.md", 6)
	image := func() string {
		t.Helper()
		return w.run("kubectl get statefulset kvcast --namespace llm --output jsonpath='{.spec.template.spec.containers[0].image}'")
	}
	wantClaim := func(want string) {
		t.Helper()
		if got := w.run(claim); got != want {
			t.Errorf("claim and StatefulSet: %q, want %q", got, want)
		}
	}
	former := image()
	w.run(all[upgrade])
	if got := image(); !strings.HasSuffix(got, ":v0.1.1") {
		t.Errorf("the image is %s after the upgrade, want v0.1.1", got)
	}
	w.run(all[rollback])
	if got := image(); got != former {
		t.Errorf("the image is %s after the rollback, want %s", got, former)
	}

	wantClaim("Bound 10Gi standard; 10Gi ")
	uid := w.run("kubectl get persistentvolumeclaim journal-kvcast-0 --namespace llm --output jsonpath='{.metadata.uid} {.spec.volumeName}'")
	page, err := os.ReadFile(filepath.Join(kubernetes.Root(t), "docs", "upgrades.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, example, _ := strings.Cut(string(page), "```console\n$ ")
	line, want, _ := strings.Cut(example, "\n")
	want, _, _ = strings.Cut(want, "\n```")
	if got, err := w.try(line); err == nil || strings.TrimSpace(got) != want {
		t.Errorf("an upgrade with another size: %v, %s; want an error, %s", err, got, want)
	}
	w.run(all[resize])
	wantClaim("Bound 20Gi standard; 20Gi ")
	if got := w.run("kubectl get persistentvolumeclaim journal-kvcast-0 --namespace llm --output jsonpath='{.metadata.uid} {.spec.volumeName}'"); got != uid {
		t.Errorf("the claim and its volume are %s, want %s as before", got, uid)
	}

	w.run(all[class])
	wantClaim("Bound 20Gi fast; 20Gi fast")

	w.run(removed + installed + all[resize])
	w.run(all[copied])
	volume := w.run("kubectl get persistentvolumeclaim journal-copy --namespace llm --output jsonpath='{.spec.volumeName}'")
	w.run(all[bound])
	wantClaim("Bound 20Gi fast; 20Gi fast")
	if got := w.run("kubectl get persistentvolumeclaim journal-kvcast-0 --namespace llm --output jsonpath='{.spec.volumeName}'"); got != volume {
		t.Errorf("the claim has the volume %s, want that of the copy, %s", got, volume)
	}
	if got := w.run("kubectl get persistentvolume --output jsonpath='{.items[*].metadata.name}'"); got != volume {
		t.Errorf("there are the volumes %s, want %s alone", got, volume)
	}
}

// TestUpgradeFromChartWithoutComponents executes the commands of the changelog for releases of a chart whose selectors have no component.
func TestUpgradeFromChartWithoutComponents(t *testing.T) {
	testclass.Packaging(t)
	requireCharts(t)
	s := kubernetes.Start(t)
	w := newWalk(t, s)
	earlier := filepath.Join(w.dir, "earlier")
	if err := os.CopyFS(earlier, os.DirFS(filepath.Join(kubernetes.Root(t), chart))); err != nil {
		t.Fatal(err)
	}
	helpers := filepath.Join(earlier, "templates", "_helpers.tpl")
	text, err := os.ReadFile(helpers)
	if err != nil {
		t.Fatal(err)
	}
	without := strings.Replace(string(text), "\napp.kubernetes.io/component: {{ .component }}\n", "\n", 1)
	if without == string(text) {
		t.Fatalf("%s has no label app.kubernetes.io/component", helpers)
	}
	if err := os.WriteFile(helpers, []byte(without), 0o600); err != nil {
		t.Fatal(err)
	}
	w.run("kubectl create namespace llm\n" + storageClasses)
	startControllers(t, s, "llm")
	all := blocks(t, "CHANGELOG.md", 2)
	for _, test := range []struct{ name, kind, values, want, commands string }{
		{"nats", "deployment", "{store: nats, nats: {servers: [nats://nats:4222]}}", "field is immutable", all[0]},
		{"file", "statefulset", "{store: file}", "updates to statefulset spec for fields other than", all[1]},
		{"memory", "deployment", "{store: memory}", "field is immutable", strings.ReplaceAll(all[1], "statefulset", "deployment")},
	} {
		w.run("echo 'journal: " + test.values + "' >values.yaml; helm install kvcast earlier --namespace llm --values values.yaml")
		if test.name == "nats" { // the commands delete the ReplicaSet that the Deployment leaves
			createReplicaSet(w)
		}
		if got, err := w.try("helm upgrade kvcast deploy/helm/kvcast --namespace llm --values values.yaml"); err == nil || !strings.Contains(got, test.want) {
			t.Errorf("%s: helm upgrade: %v, %s; want an error with %q", test.name, err, got, test.want)
		}
		wantComponent := func(want bool, object, path string) {
			t.Helper()
			got := w.run("kubectl get " + object + " kvcast --namespace llm --output jsonpath='{" + path + "}'")
			if strings.Contains(got, `"app.kubernetes.io/component":"server"`) != want {
				t.Errorf("%s: the %s selects %s; want a component: %t", test.name, object, got, want)
			}
		}
		wantComponent(true, "service", ".spec.selector")
		w.run("helm rollback kvcast --namespace llm")
		wantComponent(false, "service", ".spec.selector")
		w.run(test.commands)
		wantComponent(true, test.kind, ".spec.selector.matchLabels")
		if got := w.run("kubectl get replicaset --namespace llm --output name"); got != "" {
			t.Errorf("%s: the ReplicaSets %s are left, want none", test.name, got)
		}
		w.run("helm uninstall kvcast --namespace llm")
	}
}

// createReplicaSet creates the ReplicaSet that the Deployment has.
func createReplicaSet(w *walk) {
	w.t.Helper()
	var d manifest
	if err := json.Unmarshal([]byte(run(w.t, w.s, "kubectl", "get", "deployment", "kvcast", "--namespace", "llm", "--output", "json")), &d); err != nil {
		w.t.Fatal(err)
	}
	set, err := json.Marshal(manifest{
		"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": manifest{"name": "kvcast-earlier", "labels": d.get("spec", "template", "metadata", "labels")},
		"spec": manifest{"replicas": 1, "selector": d.get("spec", "selector"), "template": d.get("spec", "template")},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	runWith(w.t, w.s, string(set), "kubectl", "create", "--namespace", "llm", "--filename", "-")
}
