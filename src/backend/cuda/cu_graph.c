/* Graphs recorded from a stream, and the ring of page-locked blocks that feeds a graph its arguments. Calls
 * base, cu_stream, cu_heap and the driver. */
#include "backend/cuda/cu_private.h"
#include "base/alloc.h"

struct wki_cu_graph {
    wki_cu_device *dev;
    wki_cugraph graph;
    wki_cugraphexec exec; /* NULL until instantiated */
    size_t nodes;
    wki_cugraphnode first; /* NULL: not the only one without a predecessor */
};

/* ---- Capture --------------------------------------------------------------------------------------------- */

static void set_capturing(wki_cu_stream *s, bool capturing) {
    s->capturing = capturing;
    wki_cu_pool_freeze(s->dev->heap, s->pool, capturing);
}

bool wki_cu_capturing(const wki_cu_stream *s) { return s->capturing; }

int wki_cu_capture_begin(wki_cu_stream *s, wki_cu_error *err) {
    if (s->capturing)
        return wki_cu_fail(err, WKI_CU_INVALID, "the stream is captured already");
    int code = wki_cu_enter(s->dev, err);
    if (code)
        return code;
    /* Frozen first: no other thread may touch the stream from here on. */
    set_capturing(s, true);
    code = WKI_DRV(s->dev->cu, err, cuStreamBeginCapture_v2, s->handle, WKI_CAPTURE_THREAD_LOCAL);
    if (code)
        set_capturing(s, false);
    return code;
}

static int end_capture(wki_cu_stream *s, wki_cugraph *graph, wki_cu_error *err) {
    *graph = NULL;
    int code = wki_cu_enter(s->dev, err);
    if (!code)
        code = WKI_DRV(s->dev->cu, err, cuStreamEndCapture, s->handle, graph);
    set_capturing(s, false);
    return code;
}

int wki_cu_capture_end(wki_cu_stream *s, wki_cu_graph **out, wki_cu_error *err) {
    *out = NULL;
    if (!s->capturing)
        return wki_cu_fail(err, WKI_CU_INVALID, "the stream is not captured");
    wki_cu_graph *g = wki_calloc(1, sizeof *g);
    if (!g) {
        wki_cu_capture_abort(s);
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory for a graph");
    }
    g->dev = s->dev;
    int code = end_capture(s, &g->graph, err);
    if (!code)
        code = WKI_DRV(s->dev->cu, err, cuGraphGetNodes, g->graph, NULL, &g->nodes);
    size_t roots = 0;
    if (!code)
        code = WKI_DRV(s->dev->cu, err, cuGraphGetRootNodes, g->graph, NULL, &roots);
    if (!code && roots == 1)
        code = WKI_DRV(s->dev->cu, err, cuGraphGetRootNodes, g->graph, &g->first, &roots);
    if (code) {
        wki_cu_graph_destroy(g);
        return code;
    }
    *out = g;
    return WKI_CU_OK;
}

void wki_cu_capture_abort(wki_cu_stream *s) {
    wki_cugraph graph;
    if (!s->capturing)
        return;
    end_capture(s, &graph, NULL);
    if (graph)
        s->dev->cu->api.cuGraphDestroy(graph);
}

/* ---- Graphs ---------------------------------------------------------------------------------------------- */

size_t wki_cu_graph_nodes(const wki_cu_graph *g) { return g->nodes; }

int wki_cu_graph_instantiate(wki_cu_graph *g, wki_cu_error *err) {
    if (g->exec)
        return WKI_CU_OK;
    int code = wki_cu_enter(g->dev, err);
    return code ? code : WKI_DRV(g->dev->cu, err, cuGraphInstantiateWithFlags, &g->exec, g->graph, 0);
}

static int enter_ready(wki_cu_graph *g, wki_cu_error *err) {
    if (!g->exec)
        return wki_cu_fail(err, WKI_CU_INVALID, "the graph is not instantiated");
    return wki_cu_enter(g->dev, err);
}

int wki_cu_graph_upload(wki_cu_graph *g, wki_cu_stream *s, wki_cu_error *err) {
    int code = enter_ready(g, err);
    return code ? code : WKI_DRV(g->dev->cu, err, cuGraphUpload, g->exec, s->handle);
}

int wki_cu_graph_launch(wki_cu_graph *g, wki_cu_stream *s, wki_cu_error *err) {
    int code = enter_ready(g, err);
    return code ? code : WKI_DRV(g->dev->cu, err, cuGraphLaunch, g->exec, s->handle);
}

int wki_cu_graph_first(wki_cu_graph *g, const wki_cu_kernel *k, wki_cu_error *err) {
    int code = enter_ready(g, err);
    if (code)
        return code;
    if (!g->first)
        return wki_cu_fail(err, WKI_CU_INVALID, "the graph does not begin with one kernel");
    wki_cukernelnode node = {.function = k->function,
                             .grid = {k->grid[0], k->grid[1], k->grid[2]},
                             .block = {k->block[0], k->block[1], k->block[2]},
                             .smem = k->smem,
                             .params = k->params};
    return WKI_DRV(g->dev->cu, err, cuGraphExecKernelNodeSetParams_v2, g->exec, g->first, &node);
}

void wki_cu_graph_destroy(wki_cu_graph *g) {
    if (!g)
        return;
    if (!wki_cu_enter(g->dev, NULL)) {
        if (g->exec)
            g->dev->cu->api.cuGraphExecDestroy(g->exec);
        if (g->graph)
            g->dev->cu->api.cuGraphDestroy(g->graph);
    }
    wki_free(g);
}

/* ---- Ring ------------------------------------------------------------------------------------------------ */

/* Blocks start on different cache lines, so that filling one does not wait for the copy of another. */
#define RING_ALIGN ((size_t)256)

typedef struct slot {
    wki_cu_event *copied;
    bool pending; /* a copy was queued and not yet waited for */
} slot;

struct wki_cu_ring {
    wki_cu_stream *stream;
    char *host;
    size_t n, bytes, stride, at; /* at: the block that acquire gives */
    bool acquired;
    slot slots[];
};

int wki_cu_ring_create(wki_cu_stream *s, size_t n, size_t bytes, wki_cu_ring **out, wki_cu_error *err) {
    *out = NULL;
    if (n < 4 || n > 1024 || bytes == 0 || bytes > SIZE_MAX / 2048)
        return wki_cu_fail(err, WKI_CU_INVALID, "a ring of %zu blocks of %zu bytes", n, bytes);
    wki_cu_ring *r = wki_calloc(1, sizeof *r + n * sizeof *r->slots);
    if (!r)
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory for a ring");
    r->stream = s;
    r->n = n;
    r->bytes = bytes;
    r->stride = (bytes + RING_ALIGN - 1) / RING_ALIGN * RING_ALIGN;
    void *host = NULL;
    int code = wki_cu_host_alloc(s->dev, n * r->stride, &host, err);
    r->host = host;
    for (size_t i = 0; !code && i < n; i++)
        code = wki_cu_event_create(s->dev, false, &r->slots[i].copied, err);
    if (code) {
        wki_cu_ring_destroy(r);
        return code;
    }
    *out = r;
    return WKI_CU_OK;
}

void wki_cu_ring_destroy(wki_cu_ring *r) {
    if (!r)
        return;
    wki_cu_device *dev = r->stream->dev;
    for (size_t i = 0; i < r->n; i++) {
        if (r->slots[i].pending)
            wki_cu_event_sync(dev, r->slots[i].copied, NULL);
        wki_cu_event_destroy(dev, r->slots[i].copied);
    }
    wki_cu_host_free(dev, r->host);
    wki_free(r);
}

int wki_cu_ring_acquire(wki_cu_ring *r, void **host, wki_cu_error *err) {
    *host = NULL;
    slot *s = &r->slots[r->at];
    if (s->pending) {
        if (r->stream->capturing)
            return wki_cu_fail(err, WKI_CU_INVALID, "a ring is waited for while its stream is captured");
        int code = wki_cu_event_sync(r->stream->dev, s->copied, err);
        if (code)
            return code;
        s->pending = false;
    }
    r->acquired = true;
    *host = r->host + r->at * r->stride;
    return WKI_CU_OK;
}

int wki_cu_ring_submit(wki_cu_ring *r, wki_cu_ptr to, size_t bytes, wki_cu_error *err) {
    if (!r->acquired || bytes > r->bytes)
        return wki_cu_fail(err, WKI_CU_INVALID, "%zu bytes are submitted of a ring's block of %zu that is %s",
                           bytes, r->bytes, r->acquired ? "acquired" : "not acquired");
    if (r->stream->capturing)
        return wki_cu_fail(err, WKI_CU_INVALID, "a ring is submitted while its stream is captured");
    int code = wki_cu_copy_h2d(r->stream, to, r->host + r->at * r->stride, bytes, err);
    if (code)
        return code;
    slot *s = &r->slots[r->at];
    /* From here on the block is in use, also when recording fails: then the whole stream is waited for. */
    code = wki_cu_event_record(s->copied, r->stream, err);
    if (code)
        wki_cu_stream_sync(r->stream, NULL);
    s->pending = !code;
    r->at = (r->at + 1) % r->n;
    r->acquired = false;
    return code;
}
