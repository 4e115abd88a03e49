/* Reads JSON: enough for what Python's json module writes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_nvml.h"

enum { MAX_DEPTH = 16 };

void json_free(Json *node) {
    while (node) {
        Json *next = node->next;
        json_free(node->child);
        free(node->key);
        free(node->text);
        free(node);
        node = next;
    }
}

static void skip_space(const char **at) {
    while (**at == ' ' || **at == '\t' || **at == '\n' || **at == '\r') ++*at;
}

static char *json_string(const char **at) { /* escapes beyond ASCII become '?' */
    char *text = malloc(strlen(*at) + 1), *out = text;
    if (!text) return NULL;
    for (++*at; **at && **at != '"'; ++*at) {
        if (**at != '\\') { *out++ = **at; continue; }
        const char *plain = "\"\\/bfnrt", *meant = "\"\\/\b\f\n\r\t";
        const char *found = *++*at ? strchr(plain, **at) : NULL;
        if (!**at) break;
        *out++ = found ? meant[found - plain] : '?';
        for (int digits = 0; !found && **at == 'u' && digits < 4 && (*at)[1]; ++digits) ++*at;
    }
    *out = '\0';
    if (**at != '"') { free(text); return NULL; }
    ++*at;
    return text;
}

Json *json_value(const char **at, int depth) {
    Json *node = calloc(1, sizeof *node);
    if (!node || depth > MAX_DEPTH) goto broken;
    skip_space(at);
    if (**at == '{' || **at == '[') {
        char close = **at == '{' ? '}' : ']';
        Json **tail = &node->child;
        node->kind = close == '}' ? JSON_TABLE : JSON_LIST;
        for (++*at, skip_space(at); **at != close; skip_space(at)) {
            char *key = NULL;
            if (close == '}') {
                if (**at != '"' || !(key = json_string(at))) goto broken;
                skip_space(at);
                if (**at != ':') { free(key); goto broken; }
                ++*at;
            }
            if (!(*tail = json_value(at, depth + 1))) { free(key); goto broken; }
            (*tail)->key = key;
            tail = &(*tail)->next;
            skip_space(at);
            if (**at == ',') ++*at;
            else if (**at != close) goto broken;
        }
        ++*at;
    } else if (**at == '"') {
        node->kind = JSON_TEXT;
        if (!(node->text = json_string(at))) goto broken;
    } else if (!strncmp(*at, "null", 4)) {
        *at += 4;
    } else if (!strncmp(*at, "true", 4) || !strncmp(*at, "false", 5)) {
        node->kind = JSON_NUMBER;
        node->number = **at == 't';
        *at += **at == 't' ? 4 : 5;
    } else {
        char *end;
        node->kind = JSON_NUMBER;
        node->number = strtod(*at, &end);
        if (end == *at) goto broken;
        *at = end;
    }
    return node;
broken:
    json_free(node);
    return NULL;
}

const Json *member(const Json *table, const char *key) {
    const Json *node = table && table->kind == JSON_TABLE ? table->child : NULL;
    while (node && strcmp(node->key, key)) node = node->next;
    return node;
}

const Json *numbered(const Json *table, uint number) {
    char key[16];
    snprintf(key, sizeof key, "%u", number);
    return member(table, key);
}
